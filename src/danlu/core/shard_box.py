"""The part of a tensor that a process, or a file, holds: a box of it, one range of indices in every dimension.

Parameters cut by tensor parallelism or FSDP2, optimizer state and the tensors of a checkpoint are all described so, as
`torch.distributed.checkpoint` describes its chunks by offsets and sizes. Nothing here needs torch, so that
`danlu checkpoint verify` answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardBox:
    """The elements from `offsets` up to `offsets + sizes` of a tensor of `global_shape`, dimension by dimension.

    Boxes that are computed from others (`intersection`, `difference`, `relative_to`) say nothing about processes: they
    have the defaults of `replicas` and `is_writer`.
    """

    global_shape: tuple[int, ...]  # of the tensor that this is a box of
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]  # 0 in a dimension where nothing is left for this process
    replicas: int = 1  # processes that hold this same box
    is_writer: bool = True  # whether this process is the one of them that saves it

    @staticmethod
    def full(shape: Sequence[int], *, replicas: int = 1, is_writer: bool = True) -> ShardBox:
        """The box that is all of a tensor."""
        return ShardBox(tuple(shape), (0,) * len(shape), tuple(shape), replicas, is_writer)

    @property
    def is_full(self) -> bool:
        """Whether the box is all there is of the tensor."""
        return self.sizes == self.global_shape

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index behind the box, dimension by dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that index the box in the whole tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    def narrow(self, dim: int, start: int, length: int) -> ShardBox:
        """The part of this box from `start` on in one dimension, counted from the box's own beginning."""
        assert 0 <= start <= start + length <= self.sizes[dim], f"{start} + {length} of {self.sizes[dim]}"
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = length
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes))

    def shard(self, dim: int, shards: int, index: int) -> ShardBox:
        """The part of this box that one of `shards` processes has, divided along a dimension as `torch.chunk` does:
        ceil(size / shards) to each of the first, fewer to the last, none where nothing is left.
        """
        size = self.sizes[dim]
        chunk = -(-size // shards)
        start = min(size, chunk * index)
        return self.narrow(dim, start, min(size, start + chunk) - start)

    def view_of(self, tensor: Tensor) -> Tensor:
        """A view of the box in the whole tensor."""
        return tensor[self.slices]

    def same_elements(self, other: ShardBox) -> bool:
        """Whether both are the same box of tensors of one shape, whoever holds them."""
        return (self.global_shape, self.offsets, self.sizes) == (other.global_shape, other.offsets, other.sizes)

    def intersection(self, other: ShardBox) -> ShardBox | None:
        """The elements in both boxes; None where there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return ShardBox(self.global_shape, offsets, sizes) if all(size > 0 for size in sizes) else None

    def difference(self, other: ShardBox) -> Iterator[ShardBox]:
        """The elements of this box that are not in another, in boxes that do not overlap."""
        common = self.intersection(other)
        if common is None:
            yield self
            return
        # The rest is cut off slab by slab, one dimension after the other: below `common`, then above it.
        low, high = list(self.offsets), list(self.ends)
        for dim in range(len(low)):
            for slab_low, slab_high in ((low[dim], common.offsets[dim]), (common.ends[dim], high[dim])):
                if slab_low < slab_high:
                    offsets = (*low[:dim], slab_low, *low[dim + 1 :])
                    ends = (*high[:dim], slab_high, *high[dim + 1 :])
                    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
                    yield ShardBox(self.global_shape, offsets, sizes)
            low[dim], high[dim] = common.offsets[dim], common.ends[dim]

    def relative_to(self, outer: ShardBox) -> ShardBox:
        """This box as a box of `outer`, which it lies in, taken for a tensor of its own."""
        offsets = tuple(offset - origin for offset, origin in zip(self.offsets, outer.offsets, strict=True))
        return ShardBox(outer.sizes, offsets, self.sizes)

    def contiguous_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, count) in elements of each unbroken stretch that the box takes of the row-major tensor."""
        if not self.numel:
            return
        # Dimensions from `inner` on are taken whole, so that a stretch runs through all of them and through a range of
        # the dimension before.
        inner = len(self.global_shape)
        while inner and self.sizes[inner - 1] == self.global_shape[inner - 1]:
            inner -= 1
        strides = [math.prod(self.global_shape[dim + 1 :]) for dim in range(len(self.global_shape))]
        outer = max(0, inner - 1)  # dimensions that are stepped through, index by index
        count = math.prod(self.sizes[outer:])
        first = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        for index in product(*map(range, self.sizes[:outer])):
            yield first + sum(at * stride for at, stride in zip(index, strides, strict=False)), count

    def __str__(self) -> str:
        return f"[{', '.join(f'{offset}:{end}' for offset, end in zip(self.offsets, self.ends, strict=True))}]"


class BoxValue(Protocol):
    """Gives a box of a tensor by the tensor's name; None of the box: all of it.

    A collective call where several processes have boxes of the tensor: the first process gets the value, others None.
    """

    def __call__(self, name: str, box: ShardBox | None = None) -> Tensor | None: ...


def find_overlap(boxes: Iterable[ShardBox]) -> ShardBox | None:
    """Elements that are in two of the boxes of a tensor; None where no two overlap."""
    # Swept along the first dimension: a box is compared only with those before it that reach as far.
    reaching: list[ShardBox] = []
    for box in sorted((box for box in boxes if box.numel), key=lambda box: box.offsets):
        reaching = [earlier for earlier in reaching if not box.offsets or earlier.ends[0] > box.offsets[0]]
        for earlier in reaching:
            if (common := box.intersection(earlier)) is not None:
                return common
        reaching.append(box)
    return None


def find_gap(global_shape: Sequence[int], boxes: Sequence[ShardBox]) -> ShardBox | None:
    """Elements of a tensor that are in none of its boxes, which do not overlap; None where they cover it."""
    whole = ShardBox.full(global_shape)
    if sum(box.numel for box in boxes) == whole.numel:
        return None
    uncovered = [whole]
    for box in boxes:
        uncovered = [rest for region in uncovered for rest in region.difference(box)]
    return min(uncovered, key=lambda rest: rest.offsets, default=None)
