"""Novelty of texts: the ROUGE-L of each new one with all that are there (self-instruct, arXiv:2212.10560, sec. 2.2).

ROUGE-L of two texts of m and n words is F = 2 L / (m + n), with L the length of their longest common subsequence
(Lin, 2004; package rouge-score's `fmeasure`). L is at most the number of words that both have, repeats counted, which
lists of texts by word give for all texts at once; L itself is computed only where that bound reaches the threshold.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from danlu.curation.word_hashes import UNSPACED

_ASCII_SPLIT = re.compile(f"[a-z0-9]+|[{UNSPACED}]")
_SPLIT = re.compile(rf"[^\W_{UNSPACED}]+|[{UNSPACED}]")


def rouge_words(text: str) -> list[str]:
    """Words in lower case without punctuation, as rouge-score has them for ASCII; letters of other scripts count too,
    and each character of a script without spaces is a word."""
    lower = text.lower()
    return (_ASCII_SPLIT if lower.isascii() else _SPLIT).findall(lower)


def common_length(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest common subsequence, by a bit for each word of `left` (Crochemore et al., 2001)."""
    places = dict[str, int]()
    for number, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << number
    all_ones = (1 << len(left)) - 1
    unmatched = all_ones
    for word in right:
        matches = unmatched & places.get(word, 0)
        unmatched = ((unmatched + matches) | (unmatched - matches)) & all_ones
    return len(left) - unmatched.bit_count()


def rouge_l(left: Sequence[str], right: Sequence[str]) -> float:
    """ROUGE-L of two texts in words: 2 L / (m + n), 0 where either is empty."""
    total = len(left) + len(right)
    return 2 * common_length(left, right) / total if left and right else 0.0


@dataclass(frozen=True)
class Nearest:
    """The text that is most like another.

    Attributes:
        number: of the first such text, in the order of `add`; -1 where none reaches the threshold.
        similarity: their ROUGE-L; 0 where none reaches it.
    """

    number: int
    similarity: float


class Novelty:
    """The texts that are there, and how like them a new one is.

    Args:
        threshold: similarities below it are of no interest.
    """

    def __init__(self, threshold: float) -> None:
        assert 0 < threshold <= 1, f"threshold {threshold}"
        self._threshold = threshold
        self._texts = list[list[str]]()
        self._lengths = array("i")
        # By word and the how-manieth of its text it is, the numbers of the texts: words in common, repeats counted, are
        # then entries in common.
        self._texts_with: dict[tuple[str, int], array[int]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: str) -> None:
        """Adds a text to those that are there."""
        split = rouge_words(text)
        number = len(self._texts)
        self._texts.append(split)
        self._lengths.append(len(split))
        for entry in _entries(split):
            self._texts_with.setdefault(entry, array("i")).append(number)

    def nearest(self, text: str) -> Nearest:
        """The text that is most like this one, of those with a similarity of the threshold or more."""
        split = rouge_words(text)
        nearest = Nearest(-1, 0.0)
        if not split or not self._texts:
            return nearest
        for number in self._candidates(split):
            similarity = rouge_l(split, self._texts[number])
            if similarity >= self._threshold and similarity > nearest.similarity:
                nearest = Nearest(number, similarity)
        return nearest

    def _candidates(self, split: Sequence[str]) -> list[int]:
        """Numbers of the texts with enough words in common, the lowest first."""
        shared = np.zeros(len(self._texts), np.int32)
        for entry in _entries(split):
            if (numbers := self._texts_with.get(entry)) is not None:
                shared[np.frombuffer(numbers, np.int32)] += 1  # a text has an entry once
        totals = np.frombuffer(self._lengths, np.int32) + len(split)
        # A hair below the threshold: the product is rounded, and whoever passes is compared exactly.
        reaching: list[int] = np.flatnonzero(2.0 * shared >= (self._threshold - 1e-9) * totals).tolist()
        return reaching


def _entries(split: Sequence[str]) -> list[tuple[str, int]]:
    """Each word with how often it has stood before."""
    counts, entries = Counter[str](), list[tuple[str, int]]()
    for word in split:
        entries.append((word, counts[word]))
        counts[word] += 1
    return entries
