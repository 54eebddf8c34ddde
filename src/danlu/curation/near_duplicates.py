"""Rows that are nearly alike: MinHash proposes clusters, and the Jaccard index of two rows' shingles decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from danlu.curation.minhash import band_keys, signatures
from danlu.curation.ragged import Ragged
from danlu.curation.rows import Row
from danlu.curation.steps import KEEP, Marks, Needs, Summary, Verdict
from danlu.curation.tables import column, is_first, merge_tables, ragged_column, rows_at, take
from danlu.curation.word_hashes import shingles

_PART_ROWS = 2048  # of whole clusters that are compared together: some 10 MB of shingles
_KEY_SHARES = 4  # of the keys of bands, each gathered by itself
_LINKS = 1 << 16  # that are Python's numbers at a time
_STANDARD_ERRORS = 4.0  # by which an estimate may miss: 3 of 100,000 pairs at the threshold are not compared


@dataclass(frozen=True)
class NearDuplicates:
    """Drops a row that shares most of its runs of words with an earlier row that stays.

    Rows with a common band of their MinHash signatures form clusters. In each, by place: a row is dropped if its
    Jaccard index with a row that has stayed is `at_least` or more, else it stays. So each dropped row is like the row
    that stays in its place, not merely like one that was dropped itself.

    The values are FineWeb's (arXiv:2406.17557, appendix E.1): runs of 5 words, 14 bands of 8 values, similarity 0.75.

    Attributes:
        words: the length of the runs; of short rows it is the number of characters (`shingles`).
        bands: the number of bands of a signature, and of the values in each.
        at_least: the Jaccard index from which rows are duplicates.
    """

    words: int = 5
    bands: tuple[int, int] = (14, 8)
    at_least: float = 0.75
    name: ClassVar[str] = "deduplicate.minhash"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"
    rounds: ClassVar[int] = 2

    def measured_with(self) -> Mapping[str, object]:
        return {"words": self.words, "values": self.bands[0] * self.bands[1]}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """Signatures [rows, values] uint32, and how many shingles they are of."""
        sets = shingles([row.text for row in rows], self.words)
        return {"signature": signatures(sets, self.bands[0] * self.bands[1]), "shingles": sets.lengths}

    def gather(self, rows: Sequence[Row], marks: Marks, earlier: Sequence[Summary]) -> Summary:
        places = np.array([row.place for row in rows], np.int64)
        if not earlier or "share" in earlier[0]:
            filled = np.flatnonzero(column(marks, "shingles"))  # a row without shingles is like no other
            keys = band_keys(column(marks, "signature")[filled], *self.bands).reshape(-1)
            buckets = {"key": keys, "place": np.repeat(places[filled], self.bands[0])}
            if not earlier:
                return buckets
            return take(buckets, np.flatnonzero(keys % np.uint64(_KEY_SHARES) == column(earlier[0], "share")))
        at = rows_at(column(earlier[0], "place"), places)
        clustered = np.flatnonzero(at >= 0)
        sets = shingles([rows[number].text for number in clustered.tolist()], self.words)
        return {
            "place": places[clustered],
            "cluster": column(earlier[0], "cluster")[at[clustered]],
            "signature": column(marks, "signature")[clustered],
            "shingles": Ragged.of([np.unique(sets[number]) for number in range(len(sets))], np.uint64),
        }

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        of_buckets = "key" in summaries[0]
        return merge_tables(summaries, ["key", "place"] if of_buckets else ["cluster", "place"])

    def split(self, round: int, earlier: Sequence[Summary]) -> list[Sequence[Summary]]:
        """The first round by keys; the second by clusters: a part has whole ones, of some `_PART_ROWS` rows or of one
        larger cluster."""
        if not earlier:
            return [[{"share": np.array([share], np.uint64)}] for share in range(_KEY_SHARES)]
        (members,) = earlier
        of_rows = column(members, "cluster")
        names, sizes = np.unique(of_rows, return_counts=True)
        parts = (np.cumsum(sizes) - sizes) // _PART_ROWS  # [clusters] the part of each
        of_rows = parts[np.searchsorted(names, of_rows)]
        return [[take(members, np.flatnonzero(of_rows == part))] for part in np.unique(parts)] or [earlier]

    def join(self, round: int, conclusions: Sequence[Summary]) -> Summary:
        if round == 0:
            parts = ([column(part, "cluster"), column(part, "place")] for part in conclusions)
            return connected(np.concatenate([np.stack(part, axis=1) for part in parts]))
        return merge_tables(conclusions, ["place"])

    def conclude(self, round: int, summary: Summary) -> Summary:
        return clusters(summary) if round == 0 else self._duplicates(summary)

    def _duplicates(self, summary: Summary) -> Summary:
        """Place, Jaccard index and the place of the row that stays, of each duplicate, by place."""
        places, values = column(summary, "place"), column(summary, "signature")
        sets = ragged_column(summary, "shingles")
        firsts = np.flatnonzero(is_first(summary, ["cluster"])).tolist()
        dropped = list[tuple[int, int, float]]()
        for first, stop in zip(firsts, [*firsts, len(places)][1:], strict=True):
            kept = [first]
            for row in range(first + 1, stop):
                like = self._first_like(row, kept, values, sets)
                if like is None:
                    kept.append(row)
                else:
                    dropped.append((int(places[row]), int(places[like[0]]), like[1]))
        dropped.sort()
        return {
            "place": np.array([place for place, _, _ in dropped], np.int64),
            "kept": np.array([kept for _, kept, _ in dropped], np.int64),
            "jaccard": np.array([index for _, _, index in dropped], np.float64),
        }

    def _first_like(self, row: int, kept: list[int], values: np.ndarray, sets: Ragged) -> tuple[int, float] | None:
        """The first kept row with a Jaccard index of `at_least` or more with a row, and the index."""
        estimates = (values[kept] == values[row]).mean(axis=1)
        error = (self.at_least * (1 - self.at_least) / values.shape[1]) ** 0.5
        for number in np.flatnonzero(estimates >= self.at_least - _STANDARD_ERRORS * error).tolist():
            index = jaccard(sets[kept[number]], sets[row])
            if index >= self.at_least:
                return kept[number], index
        return None

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        kept, indices = column(summary, "kept"), column(summary, "jaccard")
        return [
            KEEP if at < 0 else Verdict("drop", "near duplicate", float(indices[at]), self.at_least, kept=int(kept[at]))
            for at in rows_at(column(summary, "place"), [row.place for row in rows]).tolist()
        ]


def clusters(buckets: Summary) -> Summary:
    """The rows that are joined by common keys, as `connected` has them. buckets: key and place, sorted."""
    keys, places = column(buckets, "key"), column(buckets, "place")
    starts = np.flatnonzero(is_first(buckets, ["key"]))
    owners = np.repeat(starts, np.diff(np.append(starts, len(keys))))
    is_link = owners != np.arange(len(keys))
    # Each row is linked to the first one of its bucket.
    return connected(np.stack([places[owners[is_link]], places[is_link]], axis=1))


def connected(links: np.ndarray) -> Summary:
    """The place of each row of a cluster of two or more, and that of the cluster's first row.

    Clusters are the connected parts of the graph of links [N, 2], pairs of places, by union-find (Tarjan 1975).
    """
    links = np.unique(links, axis=0)
    parents = dict[int, int]()

    def root(place: int) -> int:
        while (parent := parents.setdefault(place, place)) != place:
            parents[place] = place = parents[parent]  # halves the path
        return place

    for at in range(0, len(links), _LINKS):
        for first, other in links[at : at + _LINKS].tolist():
            low, high = sorted((root(first), root(other)))
            parents[high] = low  # the root of a cluster is its first row
    members = sorted(parents)
    return {
        "place": np.array(members, np.int64),
        "cluster": np.array([root(member) for member in members], np.int64),
    }


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """The Jaccard index of two sets, each a sorted array without repeats; 0 where one is empty."""
    if not len(left) or not len(right):
        return 0.0
    at = np.minimum(np.searchsorted(right, left), len(right) - 1)
    common = int(np.count_nonzero(right[at] == left))
    return common / (len(left) + len(right) - common)
