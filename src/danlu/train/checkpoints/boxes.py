"""Boxes of a tensor, one range of indices in every dimension: what two share, what is left out, where one lies.

Nothing here needs torch, so `danlu checkpoint verify` answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Box:
    """Indices from `start` up to `start + size`, dimension by dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def all_of(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.start, self.size, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    @property
    def count(self) -> int:
        """Elements in it."""
        return math.prod(self.size)

    def common(self, other: Box) -> Box | None:
        """What both hold; None where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Box(start, size) if all(length > 0 for length in size) else None

    def without(self, other: Box) -> Iterator[Box]:
        """The rest of this box beside another, in boxes that do not overlap."""
        common = self.common(other)
        if common is None:
            yield self
            return
        start, stop = list(self.start), list(self.stop)
        for dim in range(len(start)):
            for low, high in ((start[dim], common.start[dim]), (common.stop[dim], stop[dim])):
                if low < high:
                    begin, end = [*start[:dim], low, *start[dim + 1 :]], [*stop[:dim], high, *stop[dim + 1 :]]
                    yield Box(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))
            start[dim], stop[dim] = common.start[dim], common.stop[dim]

    def seen_from(self, other: Box) -> Box:
        """This box, counted from the start of another that it lies in."""
        return Box(tuple(mine - origin for mine, origin in zip(self.start, other.start, strict=True)), self.size)

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.start, self.stop, strict=True))}]"


def overlap(boxes: Iterable[Box]) -> Box | None:
    """Something that two of the boxes both hold; None where every two are apart."""
    # Swept along the first dimension: only boxes that reach the present one there are compared with it.
    reaching: list[Box] = []
    for box in sorted((box for box in boxes if box.count), key=lambda box: box.start):
        reaching = [other for other in reaching if not box.start or other.stop[0] > box.start[0]]
        for other in reaching:
            if (common := box.common(other)) is not None:
                return common
        reaching.append(box)
    return None


def gap(shape: Sequence[int], boxes: Sequence[Box]) -> Box | None:
    """A part of the whole that none of the boxes holds, none of which overlap; None where there is none."""
    whole = Box.all_of(shape)
    if sum(box.count for box in boxes) == whole.count:
        return None
    left = [whole]
    for box in boxes:
        left = [rest for one in left for rest in one.without(box)]
    return min(left, key=lambda rest: rest.start, default=None)


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """(offset, count) in elements of the unbroken stretches that a box takes of a row-major tensor of `shape`."""
    if not box.count:
        return
    # Dimensions from `last` on are taken whole, so that a stretch runs through all of them and a range of `last - 1`.
    last = len(shape)
    while last and box.size[last - 1] == shape[last - 1]:
        last -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    stretch = max(0, last - 1)
    count = math.prod(box.size[stretch:])
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    for index in product(*map(range, box.size[:stretch])):
        yield first + sum(at * stride for at, stride in zip(index, strides, strict=False)), count
