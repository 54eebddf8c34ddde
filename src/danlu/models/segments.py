"""Documents and trees of branches as attention sees them: runs of queries, each with the keys on its path.

T packed tokens
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from danlu.core.types import Branch

Range = tuple[int, int]
"""Tokens from the first number up to the second, which is not among them."""


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `stop`, which see one another causally and all tokens of their path before them.

    A document without branches is one segment. A stem that several branches share is one, and so is each of them; a
    branch that is the only one of its parent continues the parent's segment.
    """

    start: int
    stop: int
    path: tuple[Range, ...]
    """Tokens from the beginning of the document to `stop`, in order; ranges that touch are one."""

    @cached_property
    def before(self) -> int:
        """Tokens of the path before `start`: the position of the first token."""
        return self.path_length - (self.stop - self.start)

    @cached_property
    def path_length(self) -> int:
        """The largest number of keys that a query sees: that of the last query without a window."""
        return sum(stop - start for start, stop in self.path)

    def keys_of_any(self, start: int, stop: int, window: int | None) -> tuple[Range, ...]:
        """The keys that one of the queries `start` to `stop` sees or several do, in the order of the path."""
        return self._between(self._first_key(start, window), self._position(stop))

    def keys_of_all(self, start: int, stop: int, window: int | None) -> tuple[Range, ...]:
        """The keys that every one of the queries `start` to `stop` sees, in the order of the path."""
        return self._between(self._first_key(stop - 1, window), self._position(start) + 1)

    def moved(self, by: int) -> Segment:
        """The same tokens where there are `by` more before them."""
        path = tuple((start + by, stop + by) for start, stop in self.path)
        return Segment(self.start + by, self.stop + by, path)

    def _position(self, token: int) -> int:
        return self.before + token - self.start

    def _first_key(self, query: int, window: int | None) -> int:
        return 0 if window is None else max(0, self._position(query) - window + 1)

    def _between(self, first: int, end: int) -> tuple[Range, ...]:
        """The tokens at the positions `first` to `end` of the path."""
        ranges: list[Range] = []
        position = 0
        for start, stop in self.path:
            begin, until = start + max(0, first - position), min(stop, start + end - position)
            if begin < until:
                ranges.append((begin, until))
            position += stop - start
        return tuple(ranges)


Document = tuple[Segment, ...]
"""The segments of one document in pre-order: they are its tokens, in order."""


def documents_of(boundaries: Sequence[int], trees: Sequence[Branch]) -> tuple[Document, ...]:
    """The documents of a pack, from the offsets in T where they begin and end, and from branches if it has trees."""
    if all(branch.parent < 0 for branch in trees):
        return tuple((Segment(start, stop, ((start, stop),)),) for start, stop in itertools.pairwise(boundaries))
    children = Counter(branch.parent for branch in trees)
    documents: list[list[Segment]] = []
    number_of: list[int] = []  # in its document: the segment of each branch
    for parent, start, stop in trees:
        if parent < 0:
            documents.append([Segment(start, stop, ((start, stop),))])
            number_of.append(0)
            continue
        segments, above = documents[-1], number_of[parent]
        path = _joined(segments[above].path, (start, stop))
        if children[parent] == 1:  # it follows its parent directly, and nothing else ends there
            segments[above] = Segment(segments[above].start, stop, path)
            number_of.append(above)
        else:
            segments.append(Segment(start, stop, path))
            number_of.append(len(segments) - 1)
    return tuple(map(tuple, documents))


def _joined(path: tuple[Range, ...], following: Range) -> tuple[Range, ...]:
    start, stop = path[-1]
    return (*path[:-1], (start, following[1])) if stop == following[0] else (*path, following)
