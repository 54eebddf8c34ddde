"""A number of rows drawn at random: from all rows, or evenly from sources or languages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from danlu.curation.language import language_of
from danlu.curation.packages import require
from danlu.curation.rows import Row, source_and_row
from danlu.curation.steps import KEEP, Marks, Needs, Summary, Verdict
from danlu.curation.tables import Table, column, is_first, merge_tables, take

_KEYS = ("group", "draw", "place")
_BITS = 64


@dataclass(frozen=True)
class Selection:
    """Keeps a number of rows, each row of a group as likely as any other of it.

    A row's draw is a hash of its id and the seed: the rows with the smallest draws stay. So fewer rows of the same set
    are among more of them, and no row hangs on how rows are cut into shards.

    Attributes:
        by: random draws from all rows. quota draws from groups, as many from each: of a group that has fewer rows all
            stay, and the others have the rest in equal parts; what cannot be divided goes to the first groups by name.
        rows: how many stay. All stay where there are no more.
        of: the groups of a quota.
        seed: another one draws other rows.
    """

    rows: int
    by: Literal["random", "quota"] = "random"
    of: Literal["source", "language"] = "source"
    seed: int = 0
    name: ClassVar[str] = "select"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"
    rounds: ClassVar[int] = 1

    def measured_with(self) -> Mapping[str, object]:
        return {"language": self._needs_language}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """The language of each row where that is its group; "" elsewhere."""
        languages = [language_of(row.text)[0] if self._needs_language else "" for row in rows]
        return {"language": np.array(languages, "U8")}

    def gather(self, rows: Sequence[Row], marks: Marks, earlier: Sequence[Summary]) -> Summary:
        places = np.array([row.place for row in rows], np.int64)
        return self.merge([{"group": self._groups(rows, marks), "draw": self._draws(rows), "place": places}])

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Rows by group and draw; of each group the first `rows`, which no quota exceeds."""
        merged = merge_tables(summaries, _KEYS)
        return take(merged, np.flatnonzero(_rank(merged) < self.rows))

    def conclude(self, round: int, summary: Summary) -> Summary:
        """The group, draw and place of the last row of each group that stays; place -1 where none of a group does."""
        starts = np.flatnonzero(is_first(summary, ["group"]))
        counts = np.diff(np.append(starts, len(column(summary, "group"))))
        quotas = even_quotas(counts.tolist(), self.rows)
        last = take(summary, np.maximum(starts, starts + quotas - 1))
        return {**last, "place": np.where(quotas > 0, column(last, "place"), -1)}

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        groups, draws = self._groups(rows, marks), self._draws(rows)
        at = np.searchsorted(column(summary, "group"), groups)
        bounds, places = column(summary, "draw")[at].tolist(), column(summary, "place")[at].tolist()
        return [
            KEEP if place >= 0 and (draw, row.place) <= (bound, place) else self._drop(draw, bound, group)
            for row, draw, bound, place, group in zip(
                rows, draws.tolist(), bounds, places, groups.tolist(), strict=True
            )
        ]

    def _drop(self, draw: int, bound: int, group: str) -> Verdict:
        reason = f"not drawn: {self.of} {group}" if self.by == "quota" else "not drawn"
        return Verdict("drop", reason, value=draw / 2**_BITS, threshold=bound / 2**_BITS)

    @property
    def _needs_language(self) -> bool:
        return self.by == "quota" and self.of == "language"

    def _groups(self, rows: Sequence[Row], marks: Marks) -> np.ndarray:
        """The group of each row, a text; sources by their number."""
        if self.by == "quota" and self.of == "source":
            return np.array([str(source_and_row(row.place)[0]) for row in rows], "U8")
        return column(marks, "language")

    def _draws(self, rows: Sequence[Row]) -> np.ndarray:
        digest = require("xxhash").xxh3_64_intdigest
        return np.array([digest(row.id.encode(), self.seed) for row in rows], np.uint64)


def even_quotas(counts: Sequence[int], total: int) -> np.ndarray:
    """Parts of a total that are as equal as counts allow, none above its count; int64, in the order of the counts."""
    quotas = np.array(counts, np.int64)
    sharing = list(range(len(counts)))
    while sharing:
        rest = total - int(np.delete(quotas, sharing).sum())
        level, remainder = divmod(rest, len(sharing))
        larger = [number for number in sharing if counts[number] > level]
        if len(larger) == len(sharing):
            quotas[sharing] = level
            quotas[sharing[:remainder]] += 1
            break
        sharing = larger  # the others stay whole, and what they leave is shared by these
    return quotas


def _rank(table: Table) -> np.ndarray:
    """The number of each row in its group, of a table sorted by group."""
    is_start = is_first(table, ["group"])
    numbers = np.arange(len(is_start))
    return numbers - np.maximum.accumulate(np.where(is_start, numbers, 0)) if len(numbers) else numbers
