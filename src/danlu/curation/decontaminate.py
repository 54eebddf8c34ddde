"""Rows that hold parts of a benchmark: runs of 13 words in common, as for GPT-3 (arXiv:2005.14165, appendix C)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from danlu.curation.ragged import Ragged
from danlu.curation.rows import WRITTEN, Row
from danlu.curation.steps import KEEP, Marks, Needs, Summary, Verdict
from danlu.curation.tables import column
from danlu.curation.word_hashes import mix, sequence_hashes, windows, word_hashes

_THOUSANDS = re.compile(r"(?<=\d)[,，](?=\d{3}(?!\d))")
_MOST_ROWS, _MOST_SHARE = 2, 0.01


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that no row may hold.

    Attributes:
        name: its name in verdicts.
        texts: the text of each of its rows: the question, with its answer where that is given away too.
    """

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Decontaminate:
    """Drops rows that share a run of words with a row of a benchmark.

    Words are compared without case, punctuation, width and separators of thousands. A benchmark row of fewer words,
    down to `shortest`, must stand in a row whole; a still shorter one must be a whole line or message of it. A run of
    words that more than 2 rows and 1 % of the rows of a benchmark have is its header or instruction, and no overlap.

    Attributes:
        benchmarks: what must not be in the rows.
        words: the length of the runs.
        shortest: fewest words of a benchmark row that is looked for within lines.
    """

    benchmarks: tuple[Benchmark, ...]
    words: int = 13
    shortest: int = 8
    name: ClassVar[str] = "decontaminate"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        digest = sum(int(mix(hashes).sum()) for hashes, _ in self._index.values())
        return {"index": digest, "words": self.words, "shortest": self.shortest}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """The runs of words of each row that are a benchmark's, and the number of that benchmark, -1 for none."""
        overlap, benchmark = np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64)
        units = word_hashes([_THOUSANDS.sub("", row.text) for row in rows])
        for size, (hashes, owners) in self._index.items():
            runs = windows(units, size) if size else _lines(rows)
            at = np.minimum(np.searchsorted(hashes, runs.values), len(hashes) - 1)
            is_common = hashes[at] == runs.values
            rows_with = runs.owners[is_common]
            overlap += np.bincount(rows_with, minlength=len(rows))
            benchmark[rows_with] = owners[at[is_common]]
        return {"overlap": overlap, "benchmark": benchmark}

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        counts, owners = column(marks, "overlap").tolist(), column(marks, "benchmark").tolist()
        return [
            Verdict("drop", f"contaminated: {self.benchmarks[owner].name}", value=float(count), threshold=0.0)
            if count
            else KEEP
            for count, owner in zip(counts, owners, strict=True)
        ]

    @cached_property
    def _index(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Sorted hashes of runs by their length (0: whole lines), and the number of the benchmark of each."""
        by_size: dict[int, list[np.ndarray]] = {}
        for number, benchmark in enumerate(self.benchmarks):
            for size, hashes in self._runs(benchmark):
                by_size.setdefault(size, []).append(np.stack([hashes, np.full(len(hashes), number, np.uint64)]))
        index = {}
        for size, parts in by_size.items():
            hashes, owners = np.concatenate(parts, axis=1)
            hashes, firsts = np.unique(hashes, return_index=True)
            index[size] = (hashes, owners[firsts].astype(np.int64))
        return index

    def _runs(self, benchmark: Benchmark) -> Iterator[tuple[int, np.ndarray]]:
        """The hashes of the runs that are looked for, by their length; 0 for those that must be whole lines."""
        units = word_hashes([_THOUSANDS.sub("", text) for text in benchmark.texts])
        lengths = units.lengths
        shorter = units.take(np.flatnonzero((lengths > 0) & (lengths < self.shortest)))
        runs = {0: sequence_hashes(shorter), self.words: _specific(windows(units, self.words))}
        for size in range(self.shortest, self.words):
            runs[size] = windows(units.take(np.flatnonzero(lengths == size)), size).values
        return ((size, hashes) for size, hashes in runs.items() if len(hashes))


def _specific(runs: Ragged) -> np.ndarray:
    """The different runs of a benchmark's rows, but for those that too many of the rows have."""
    of_rows = np.unique(np.stack([runs.values, runs.owners.astype(np.uint64)]), axis=1)[0]  # each once a row
    hashes, counts = np.unique(of_rows, return_counts=True)
    return hashes[counts <= max(_MOST_ROWS, _MOST_SHARE * len(runs))]


def _lines(rows: Sequence[Row]) -> Ragged:
    """A hash of the words of each line of each row, and of each message of several lines."""
    texts = [[part.text for part in row.parts if part.role in WRITTEN] for row in rows]
    lines = [[line for text in of_row for line in {*text.split("\n"), text}] for of_row in texts]
    units = word_hashes([_THOUSANDS.sub("", line) for of_row in lines for line in of_row])
    return Ragged(sequence_hashes(units), np.cumsum([len(of_row) for of_row in lines], dtype=np.int64))
