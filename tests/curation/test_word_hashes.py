"""Words, shingles and their hashes equal those of plain Python over strings."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pytest

from danlu.curation.ragged import Ragged
from danlu.curation.word_hashes import UNSPACED, normalize, sequence_hashes, shingles, windows, word_hashes

TEXTS = [
    "The quick, brown fox's jumps -- over THE lazy dog; the quick brown fox!",
    "",
    "...!? —",
    "OK",
    "Naïve café ２０２４ déjà-vu ﬁne हिन्दी में",
    "今天天气很好，我们去公园吧。Python 3.12 很快",
    "one two three four five six seven eight nine",
    "one two three four five six seven eight nine ten",
    "𠀀𠀁 rare 한국어 문장 ภาษาไทย",
]


def plain_words(text: str) -> list[str]:
    """Words by their definition: characters of scripts without spaces, and runs of other letters, marks and digits."""
    words, run = [], ""
    for character in [*normalize(text), " "]:
        is_word = unicodedata.category(character)[0] in "LMN"
        if is_word and not re.match(f"[{UNSPACED}]", character):
            run += character
            continue
        words += [run] * bool(run) + [character] * is_word
        run = ""
    return words


def plain_characters(text: str) -> list[str]:
    """Characters of words, and a space for the first character behind each word."""
    characters, in_word = list[str](), False
    for character in [*normalize(text), "\n"]:
        is_word = unicodedata.category(character)[0] in "LMN"
        characters += [character if is_word else " "] * (is_word or in_word)
        in_word = is_word
    return characters


def plain_shingles(text: str, size: int) -> set[tuple[str, ...]]:
    units = plain_words(text)
    if len(units) < 2 * size:
        units = plain_characters(text)
        if 0 < len(units) < size:
            return {tuple(units)}
    return {tuple(units[at : at + size]) for at in range(len(units) - size + 1)}


def same_partition(hashes: list[int], values: list[object]) -> bool:
    """Whether equal values have equal hashes, and others have others."""
    return len(set(zip(hashes, values, strict=True))) == len(set(hashes)) == len(set(values))


def test_words_are_those_of_their_definition() -> None:
    hashes = word_hashes(TEXTS)
    words = [plain_words(text) for text in TEXTS]
    assert hashes.lengths.tolist() == [len(each) for each in words]
    assert same_partition(hashes.values.tolist(), [word for each in words for word in each])
    assert not same_partition(hashes.values.tolist(), [word[:2] for each in words for word in each])  # control


@pytest.mark.parametrize("size", [1, 3, 5])
def test_shingles_are_those_of_their_definition(size: int) -> None:
    hashes = shingles(TEXTS, size)
    assert len(hashes) == len(TEXTS)
    expected = [plain_shingles(text, size) for text in TEXTS]
    assert [len(set(hashes[row].tolist())) for row in range(len(TEXTS))] == [len(each) for each in expected]
    for row, expected_set in enumerate(expected):
        for other, other_expected in enumerate(expected):
            common = set(hashes[row].tolist()) & set(hashes[other].tolist())
            assert len(common) == len(expected_set & other_expected), (TEXTS[row], TEXTS[other])


def test_a_text_without_letters_has_no_shingle_and_a_short_one_has_one() -> None:
    assert shingles(["...!?", "OK", "ok.", "no", ""], 5).lengths.tolist() == [0, 1, 1, 1, 0]
    first, second, third = (shingles(["OK", "ok.", "no"], 5)[row] for row in range(3))
    assert first == second != third


def test_hashes_do_not_hang_on_the_texts_around() -> None:
    together = shingles(TEXTS, 5)
    for row, text in enumerate(TEXTS):
        assert np.array_equal(together[row], shingles([text], 5).values)


def test_blocks_of_texts_are_hashed_alike() -> None:
    long = "x" * 70_000
    hashes = word_hashes([f"{long} behind", "a block", f"behind {long}", "block a"])
    assert hashes.lengths.tolist() == [2, 2, 2, 2]
    assert hashes[0].tolist() == hashes[2].tolist()[::-1] and hashes[1].tolist() == hashes[3].tolist()[::-1]


def test_sequences_are_hashed_in_order() -> None:
    hashes = sequence_hashes(word_hashes(["a b c", "A, b; c!", "c b a", "", "a b", "a b c a"])).tolist()
    assert hashes[0] == hashes[1]
    assert hashes[3] == 0
    assert len(set(hashes)) == 5


def test_windows_do_not_cross_texts() -> None:
    units = Ragged(np.array([1, 2, 3, 1, 2], np.uint64), np.array([3, 3, 5]))
    hashes = windows(units, 2)
    assert hashes.stops.tolist() == [2, 2, 3]
    assert hashes.values[0] == hashes.values[2] != hashes.values[1]
    assert windows(units, 3, whole_if_shorter=True).lengths.tolist() == [1, 0, 1]
