"""Hashes of words and of runs of words (shingles, n-grams), for many texts at once.

A word is a run of letters, marks and digits; each character of a script that is written without spaces (Chinese,
Japanese, Thai, ...) is a word of its own. Case, punctuation, spaces and the width of characters do not count. Texts
are arrays of code points here, and a word's hash is a difference of prefix sums of a polynomial, so no word becomes a
Python string.

    C characters · U words or characters · N texts
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from danlu.curation.ragged import Ragged, join

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U000323af"
)
"""Characters of scripts that are written without spaces, as ranges in a regular expression."""
_BETWEEN, _IN_WORD, _WORD = 0, 1, 2  # kinds of characters: no part of a word, a part of one, a word of its own
_LAST_CODE = 0x20000  # it and what follows are rare Chinese characters
_BLOCK_CHARACTERS = 1 << 16  # of texts hashed together: their arrays stay in the processor's cache
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_UNIT_BASE = 0xD1342543DE82EF95


def normalize(text: str) -> str:
    """A text in the case and the width in which words are compared."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower()


def word_hashes(texts: Sequence[str]) -> Ragged:
    """A uint64 hash of each word."""
    return join([_word_hashes(codes, kinds, ends) for codes, kinds, ends in _blocks(texts)])


def character_hashes(texts: Sequence[str]) -> Ragged:
    """A uint64 hash of each character of the words; what stands between two words, or behind the last, is one too."""
    return join([_character_hashes(codes, kinds, ends) for codes, kinds, ends in _blocks(texts)])


def shingles(texts: Sequence[str], size: int) -> Ragged:
    """Hashes of what texts are compared by: runs of `size` words, or characters of texts of under 2 x `size` words.

    In a short text one other word would change every run of words. A text of fewer than `size` characters has one
    shingle, the whole of it, and one without any letter or digit has none.
    """
    words = word_hashes(texts)
    short = np.flatnonzero(words.lengths < 2 * size)
    of_words = windows(words, size)
    if not len(short):
        return of_words
    characters = character_hashes([texts[number] for number in short.tolist()])
    of_characters = windows(characters, size, whole_if_shorter=True)
    order = np.arange(len(words))
    order[short] = len(words) + np.arange(len(short))
    return join([of_words, of_characters]).take(order)


def windows(units: Ragged, size: int, *, whole_if_shorter: bool = False) -> Ragged:
    """Hashes of all runs of `size` units of each text.

    Args:
        whole_if_shorter: a text of fewer units, but of any, has the hash of all of them instead of none.
    """
    values = units.values
    left = np.repeat(units.stops, units.lengths) - np.arange(len(values))  # [U] units from here to the text's end
    powers = _powers(_UNIT_BASE, size)
    padded = np.concatenate([values, np.zeros(size - 1, np.uint64)])
    sums = np.zeros(len(values), np.uint64)
    for offset in range(size):
        # Behind the end of a text there is nothing: only windows that are `whole_if_shorter` reach beyond it.
        sums += np.where(left > offset, padded[offset : offset + len(values)], np.uint64(0)) * powers[offset]
    is_whole = left >= size
    if whole_if_shorter:
        is_whole |= np.repeat(units.lengths, units.lengths) == left  # the first of each text
    return Ragged(mix(sums), units.stops).select(is_whole)


def sequence_hashes(units: Ragged) -> np.ndarray:
    """A uint64 hash [N] of all units of each text, in order; 0 for a text without any."""
    hashes = np.zeros(len(units), np.uint64)
    lengths = units.lengths
    filled = np.flatnonzero(lengths)
    if len(filled):
        positions = np.arange(len(units.values)) - np.repeat(units.stops - lengths, lengths)
        terms = units.values * _powers(_UNIT_BASE, int(lengths.max()))[positions]
        hashes[filled] = mix(np.add.reduceat(terms, (units.stops - lengths)[filled]))
    return hashes


class SubstringHashes:
    """Hashes of parts of a text: of a part c_0 c_1 ... the sum of (c_i + 1) base^i modulo 2^64, mixed.

    Args:
        codes: code points [C] of the text, unsigned.
    """

    def __init__(self, codes: np.ndarray) -> None:
        self._sums = np.zeros(len(codes) + 1, np.uint64)  # of the text up to each place
        np.cumsum((codes + np.uint64(1)) * _powers(_BASE, len(codes)), out=self._sums[1:])
        self._inverses = _powers(_INVERSE, len(codes) + 1)

    def between(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The uint64 hash of each part from a start to a stop. Equal parts have equal hashes wherever they are."""
        return mix((self._sums[stops] - self._sums[starts]) * self._inverses[starts])


def code_points(text: str) -> np.ndarray:
    """The code points [C] of a text, as uint8 where all are below 128, else as uint32."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def mix(values: np.ndarray) -> np.ndarray:
    """Numbers with their bits well mixed, a permutation of all uint64 (MurmurHash3's finalizer)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def _blocks(texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Texts in blocks: code points [C] of them all, one newline behind each, their kinds [C], and where each ends."""
    texts = [normalize(text) for text in texts]
    first, size = 0, 0
    for number, text in enumerate(texts):
        size += len(text) + 1
        if size >= _BLOCK_CHARACTERS or number == len(texts) - 1:
            yield _block(texts[first : number + 1])
            first, size = number + 1, 0
    if not texts:
        yield _block([])


def _block(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    joined = "".join(f"{text}\n" for text in texts)
    ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64)
    codes = code_points(joined)
    return codes, _character_kinds()[codes if codes.dtype == np.uint8 else np.minimum(codes, _LAST_CODE)], ends


@cache
def _character_kinds() -> np.ndarray:
    """The kind of each code point up to the last, which stands for those behind it: uint8."""
    kinds = np.zeros(_LAST_CODE + 1, np.uint8)
    is_word = re.compile(f"[{UNSPACED}]").match
    for code in range(_LAST_CODE):
        if unicodedata.category(chr(code))[0] in "LMN":
            kinds[code] = _WORD if is_word(chr(code)) else _IN_WORD
    kinds[_LAST_CODE] = _WORD
    return kinds


def _word_hashes(codes: np.ndarray, kinds: np.ndarray, ends: np.ndarray) -> Ragged:
    is_inner = np.zeros(len(kinds) + 2, bool)
    is_inner[1:-1] = kinds == _IN_WORD
    is_alone = kinds == _WORD
    firsts = np.flatnonzero(is_alone | (is_inner[1:-1] & ~is_inner[:-2]))
    lasts = np.flatnonzero(is_alone | (is_inner[1:-1] & ~is_inner[2:]))
    return Ragged(SubstringHashes(codes).between(firsts, lasts + 1), np.searchsorted(firsts, ends))


def _character_hashes(codes: np.ndarray, kinds: np.ndarray, ends: np.ndarray) -> Ragged:
    is_word = kinds != _BETWEEN
    is_kept = is_word.copy()
    is_kept[1:] |= is_word[:-1]  # the first character behind a word stands for the space
    values = mix(np.where(is_word, codes, np.uint64(ord(" "))).astype(np.uint64) + np.uint64(1))
    return Ragged(values, ends).select(is_kept)


def _powers(base: int, count: int) -> np.ndarray:
    """The first `count` powers of a base modulo 2^64, from 1."""
    return _kept_powers(base)[:count] if count <= 2 * _BLOCK_CHARACTERS else _computed_powers(base, count)


@cache
def _kept_powers(base: int) -> np.ndarray:
    return _computed_powers(base, 2 * _BLOCK_CHARACTERS)


def _computed_powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
