"""Gopher's rules against repetition (arXiv:2112.11446, table A1): lines, paragraphs and n-grams that come again.

U words of a batch · N documents
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np

from danlu.curation.quality.rules import Rule, judge, share
from danlu.curation.ragged import Ragged
from danlu.curation.rows import Row
from danlu.curation.steps import Marks, Needs, Summary, Verdict
from danlu.curation.word_hashes import SubstringHashes, code_points, windows
from danlu.curation.words import SplitWords, function_name, split_words

_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")
_DOCUMENT_BITS = 12
_DOCUMENTS = 1 << _DOCUMENT_BITS  # that are measured together: their numbers fit into the upper bits of keys


@dataclass(frozen=True)
class RepetitionRules:
    """Drops documents of which too much is repeated.

    Shares of characters are those of the whole text. Of the n-grams of `top` the most frequent one counts, with all its
    copies; of those of `repeated` every copy but the first, none of which overlap.

    Attributes:
        paragraphs: largest share of repeated paragraphs.
        paragraph_characters: largest share of characters in them.
        lines: largest share of repeated lines.
        line_characters: largest share of characters in them.
        top: n, and the largest share of characters in the most frequent n-gram.
        repeated: n, and the largest share of characters in repeated n-grams.
        split_words: gives the words of a text.
    """

    paragraphs: float = 0.3
    paragraph_characters: float = 0.2
    lines: float = 0.3
    line_characters: float = 0.2
    top: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    repeated: tuple[tuple[int, float], ...] = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1))
    split_words: SplitWords = split_words
    name: ClassVar[str] = "quality.gopher-repetition"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        sizes = {"top": [n for n, _ in self.top], "repeated": [n for n, _ in self.repeated]}
        return {**sizes, "split_words": function_name(self.split_words)}

    @property
    def rules(self) -> list[Rule]:
        """The rules in the order in which they are tried."""
        return [
            Rule("characters", "repetition: no text", least=1),
            Rule("paragraphs", "repetition: paragraphs", most=self.paragraphs),
            Rule("paragraph_characters", "repetition: characters in paragraphs", most=self.paragraph_characters),
            Rule("lines", "repetition: lines", most=self.lines),
            Rule("line_characters", "repetition: characters in lines", most=self.line_characters),
            *(Rule(f"top_{n}", f"repetition: most frequent {n}-gram", most=most) for n, most in self.top),
            *(Rule(f"repeated_{n}", f"repetition: repeated {n}-grams", most=most) for n, most in self.repeated),
        ]

    def measure(self, rows: Sequence[Row]) -> Marks:
        blocks = [
            self._measured([row.text for row in rows[at : at + _DOCUMENTS]]) for at in range(0, len(rows), _DOCUMENTS)
        ]
        blocks = blocks or [self._measured([])]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        return judge(self.rules, marks, len(rows))

    def _measured(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """The marks of at most `_DOCUMENTS` texts."""
        characters = np.array([len(text) for text in texts], np.float64)
        shares = np.array([_of_paragraphs(text) for text in texts], np.float64).reshape(len(texts), 4)
        names = ("paragraphs", "paragraph_characters", "lines", "line_characters")
        marks = {"characters": characters, **dict(zip(names, shares.T, strict=True))}
        grams = _NGrams([self.split_words(text) for text in texts])
        for n, _ in self.top:
            marks[f"top_{n}"] = grams.most_frequent(n) / np.maximum(characters, 1)
        for n, _ in self.repeated:
            marks[f"repeated_{n}"] = grams.repeated(n) / np.maximum(characters, 1)
        return marks


def repeated(elements: Iterable[str]) -> tuple[int, int]:
    """The number of elements that are equal to an earlier one, and their characters."""
    seen = set[str]()
    count = characters = 0
    for element in elements:
        if element in seen:
            count += 1
            characters += len(element)
        seen.add(element)
    return count, characters


def _of_paragraphs(text: str) -> tuple[float, ...]:
    """Shares of repeated paragraphs and of their characters, and the same of lines."""
    paragraphs, lines = _PARAGRAPHS.split(text.strip()), _LINES.split(text)
    (paragraph_count, in_paragraphs), (line_count, in_lines) = repeated(paragraphs), repeated(lines)
    return (
        paragraph_count / len(paragraphs),
        share(in_paragraphs, len(text)),
        line_count / len(lines),
        share(in_lines, len(text)),
    )


class _NGrams:
    """Counts of the n-grams of some documents, at most `_DOCUMENTS`, from hashes of their words."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        lengths = np.fromiter(map(len, chain.from_iterable(documents)), np.int64)
        self._bounds = np.concatenate([[0], np.cumsum(lengths)])  # [U + 1] of words in all characters end to end
        self._hashes = SubstringHashes(code_points("".join(chain.from_iterable(documents))))
        stops = np.cumsum([len(words) for words in documents], dtype=np.int64)
        self._units = Ragged(self._hashes.between(self._bounds[:-1], self._bounds[1:]), stops)
        self._left = np.repeat(stops, self._units.lengths) - np.arange(len(lengths))  # [U] words to the document's end
        self._documents = self._units.owners.astype(np.uint64) << np.uint64(64 - _DOCUMENT_BITS)

    def most_frequent(self, n: int) -> np.ndarray:
        """Characters [N] in all copies of each document's most frequent n-gram, with a space between its words.

        Of several that are as frequent it is the one that comes first.
        """
        result = np.zeros(len(self._units))
        starts = np.flatnonzero(self._left >= n)
        if not len(starts):
            return result
        keys = self._keys(windows(self._units, n).values, starts)
        ordered = np.sort(keys)
        run_starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(np.append(run_starts, len(ordered)))
        owners = (ordered[run_starts] >> np.uint64(64 - _DOCUMENT_BITS)).astype(np.int64)
        first_runs = np.flatnonzero(np.concatenate([[True], owners[1:] != owners[:-1]]))
        most = np.zeros(len(result), np.int64)
        most[owners[first_runs]] = np.maximum.reduceat(counts, first_runs)
        frequent = ordered[run_starts[counts == most[owners]]]
        at = np.minimum(np.searchsorted(frequent, keys), len(frequent) - 1)
        candidates = starts[frequent[at] == keys]
        documents = self._units.owners[candidates]
        is_first = np.concatenate([[True], documents[1:] != documents[:-1]])
        candidates, documents = candidates[is_first], documents[is_first]
        result[documents] = (self._characters(candidates, n) + n - 1) * most[documents]
        return result

    def repeated(self, n: int) -> np.ndarray:
        """Characters [N] in the n-grams of each document that were there before, without spaces.

        A document is read from its beginning; behind a repeated n-gram it goes on with the word that follows.
        """
        result = np.zeros(len(self._units))
        starts = np.flatnonzero(self._left >= n)
        # The words of an n-gram are joined: it is its characters that come again.
        keys = self._keys(self._hashes.between(self._bounds[starts], self._bounds[starts + n]), starts)
        ordered = np.sort(keys)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        owners = self._units.owners[starts]
        for document in np.unique(again >> np.uint64(64 - _DOCUMENT_BITS)).tolist():
            first, stop = np.searchsorted(owners, [document, document + 1])
            places = starts[first + _repeats(keys[first:stop].tolist(), n)]
            result[document] = self._characters(places, n).sum()
        return result

    def _keys(self, hashes: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Hashes of n-grams with the number of their document in the upper bits."""
        return hashes >> np.uint64(_DOCUMENT_BITS) | self._documents[starts]

    def _characters(self, starts: np.ndarray, n: int) -> np.ndarray:
        return self._bounds[starts + n] - self._bounds[starts]


def _repeats(keys: list[int], n: int) -> np.ndarray:
    """Places of the n-grams that are repeated, each behind the one before."""
    places, seen, at = list[int](), set[int](), 0
    while at < len(keys):
        if keys[at] in seen:
            places.append(at)
            at += n
        else:
            seen.add(keys[at])
            at += 1
    return np.array(places, np.int64)
