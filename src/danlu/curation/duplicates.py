"""Exact duplicates, and paragraphs that a document shares with another: the copy that stays is the first by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from danlu.curation.ragged import Ragged
from danlu.curation.rows import Row, content_digest
from danlu.curation.steps import KEEP, Marks, Needs, Summary, Verdict
from danlu.curation.tables import column, is_first, merge_tables, ragged_column, rows_at, take
from danlu.curation.word_hashes import sequence_hashes, word_hashes


@dataclass(frozen=True)
class ExactDuplicates:
    """Drops a row with the roles and texts of an earlier one, to the character."""

    name: ClassVar[str] = "deduplicate.exact"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"
    rounds: ClassVar[int] = 1

    def measured_with(self) -> Mapping[str, object]:
        return {}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """A hash of 128 bits, in two halves."""
        halves = np.frombuffer(b"".join(content_digest(row.parts) for row in rows), "<u8").reshape(len(rows), 2)
        return {"upper": halves[:, 0], "lower": halves[:, 1]}

    def gather(self, rows: Sequence[Row], marks: Marks, earlier: Sequence[Summary]) -> Summary:
        return {**marks, "place": _places(rows)}

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        return merge_tables(summaries, ["upper", "lower", "place"])

    def conclude(self, round: int, summary: Summary) -> Summary:
        """The place of each duplicate, sorted, and of the row that stays in its place."""
        is_kept = is_first(summary, ["upper", "lower"])
        places = column(summary, "place")
        kept = places[is_kept][np.cumsum(is_kept) - 1]
        return merge_tables([take({"place": places, "kept": kept}, np.flatnonzero(~is_kept))], ["place"])

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        kept = column(summary, "kept")
        return [
            KEEP if at < 0 else Verdict("drop", "exact duplicate", value=1.0, threshold=1.0, kept=int(kept[at]))
            for at in rows_at(column(summary, "place"), _places(rows)).tolist()
        ]


@dataclass(frozen=True)
class RepeatedParagraphs:
    """Removes the lines of documents that stand in an earlier document, or earlier in the same one, word for word.

    A line is a paragraph here, as in text taken from pages. Conversations stay as they are, and count for nothing: an
    answer without some of its lines is another answer.

    Attributes:
        words: lines of fewer words stay, repeated or not: headings, braces, names of speakers.
        drop_at: a document is dropped when this share of its characters or more is repeated lines.
    """

    words: int = 8
    drop_at: float = 1.0
    name: ClassVar[str] = "deduplicate.paragraph"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"
    rounds: ClassVar[int] = 1

    def measured_with(self) -> Mapping[str, object]:
        return {"words": self.words}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """A hash of the words of each line, 0 for a line of fewer than `words`."""
        lines = [row.text.split("\n") if row.is_document else [] for row in rows]
        words = word_hashes([line for of_row in lines for line in of_row])
        hashes = np.where(words.lengths >= self.words, sequence_hashes(words), np.uint64(0))
        return {"lines": Ragged(hashes, np.cumsum([len(of_row) for of_row in lines], dtype=np.int64))}

    def gather(self, rows: Sequence[Row], marks: Marks, earlier: Sequence[Summary]) -> Summary:
        lines = ragged_column(marks, "lines")
        owners = lines.owners
        numbers = np.arange(len(owners)) - (lines.stops - lines.lengths)[owners]
        table = {"line": lines.values, "place": _places(rows)[owners], "number": numbers}
        return take(table, np.flatnonzero(lines.values))

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        return merge_tables(summaries, ["line", "place", "number"])

    def conclude(self, round: int, summary: Summary) -> Summary:
        """The place and number of each line that is repeated, sorted."""
        repeated = take(summary, np.flatnonzero(~is_first(summary, ["line"])))
        return merge_tables([{name: repeated[name] for name in ("place", "number")}], ["place", "number"])

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        places, numbers = column(summary, "place"), column(summary, "number")
        firsts, stops = (np.searchsorted(places, _places(rows), side=side).tolist() for side in ("left", "right"))
        return [
            self._verdict(row, set(numbers[first:stop].tolist())) if first < stop else KEEP
            for row, first, stop in zip(rows, firsts, stops, strict=True)
        ]

    def _verdict(self, row: Row, repeated: set[int]) -> Verdict:
        """The verdict on a document with the numbers of its repeated lines."""
        lines = row.text.split("\n")
        remaining = [line for number, line in enumerate(lines) if number not in repeated]
        share = 1 - sum(map(len, remaining)) / sum(map(len, lines))
        if share >= self.drop_at or not any(line.strip() for line in remaining):
            return Verdict("drop", "repeated paragraphs", value=share, threshold=self.drop_at)
        return Verdict("change", "repeated paragraphs", value=share, threshold=0.0, texts=("\n".join(remaining),))


def _places(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row.place for row in rows], np.int64)
