"""ROUGE-L next to its definition, and the nearest of many texts next to all comparisons."""

from __future__ import annotations

import random

import pytest

from danlu.production.synthesis.novelty import Nearest, Novelty, common_length, rouge_l, rouge_words


def defined_length(left: list[str], right: list[str]) -> int:
    """The longest common subsequence by its recursion."""
    row = [0] * (len(right) + 1)
    for word in left:
        before = row[:]
        for number, other in enumerate(right):
            row[number + 1] = before[number] + 1 if word == other else max(before[number + 1], row[number])
    return row[-1]


def texts(count: int, draw: random.Random) -> list[str]:
    """Texts of a few words, many of them changed copies of earlier ones."""
    made = list[str]()
    for _ in range(count):
        split = draw.choices("abcdefgh", k=draw.randint(1, 12))
        if made and draw.random() < 0.7:
            split = draw.choice(made).split()
            for _ in range(draw.randint(0, 3)):
                split[draw.randrange(len(split))] = draw.choice("abcdefgh")
        made.append(" ".join(split))
    return made


def test_the_length_is_that_of_the_definition() -> None:
    draw = random.Random(0)
    for _ in range(300):
        left, right = (draw.choices("abcd", k=draw.randint(0, 70)) for _ in range(2))
        assert common_length(left, right) == defined_length(left, right)
    example = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    assert rouge_l(*map(rouge_words, example)) == 2 * 5 / (9 + 8)  # the, quick, brown, jumps, the
    assert rouge_words("It's 3.5 – déjà 你好!") == ["it", "s", "3", "5", "déjà", "你", "好"]


@pytest.mark.parametrize("threshold", [0.3, 0.7, 1.0])
def test_the_nearest_is_that_of_all_comparisons(threshold: float) -> None:
    """A bound that leaves one out, or a threshold that is missed by rounding, shows here."""
    novelty, split, near = Novelty(threshold), list[list[str]](), 0
    for text in texts(120, random.Random(1)):
        words = rouge_words(text)
        similarities = [2 * defined_length(words, other) / (len(words) + len(other)) for other in split]
        best = max(similarities, default=0.0)
        expected = Nearest(similarities.index(best), best) if similarities and best >= threshold else Nearest(-1, 0.0)
        assert novelty.nearest(text) == expected
        near += expected.number >= 0
        novelty.add(text)
        split.append(words)
    assert 25 < near < 120


def test_texts_without_words_are_near_nothing() -> None:
    novelty = Novelty(0.5)
    novelty.add("!!!")
    assert novelty.nearest("!!!") == novelty.nearest("") == Nearest(-1, 0.0)
