"""How parameters lie in the tensors of a Hugging Face folder: whole, as boxes of them, transposed, or interleaved.

A tensor on disk is a list of parts, so that a reader or writer of only a box of a parameter (some experts, some rows)
knows its elements in each tensor. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from danlu.core.shard_box import ShardBox

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A box of one parameter, and its place in a tensor on disk.

    With a stride, `stride` parts are interleaved along `axis`: every other column of gate_up is gate's.
    """

    parameter: str
    box: ShardBox  # of the parameter; leading dimensions of size 1 may be missing on disk
    offsets: tuple[int, ...]  # of its first element on disk; with a stride, of the first element of all that take turns
    transposed: bool = False  # whether the last two dimensions are the other way round on disk
    stride: int = 1  # along `axis`, from one of its indices to the next
    first: int = 0  # which of those that take turns it is
    axis: int = 0  # of the tensor on disk

    @property
    def is_plain(self) -> bool:
        """Whether the part's elements have the same order on disk as in the parameter."""
        return not self.transposed and self.stride == 1

    def on_disk(self, box: ShardBox, shape: tuple[int, ...]) -> ShardBox:
        """The least box of a tensor of that shape which has all of a box of the parameter, that lies in this part's.

        With a stride it begins and ends with a whole turn: it is the same for all parts that take turns.
        """
        inner = box.relative_to(self.box)
        offsets, sizes = list(inner.offsets), list(inner.sizes)
        for values in (offsets, sizes):
            if self.transposed:
                values[-2], values[-1] = values[-1], values[-2]
            del values[: len(values) - len(shape)]
            values[self.axis] *= self.stride
        return ShardBox(shape, tuple(map(sum, zip(self.offsets, offsets, strict=True))), tuple(sizes))

    def view_of(self, disk: Tensor) -> Tensor:
        """This part's elements of a box that `on_disk` tells: a view with the parameter's dimensions in their order."""
        view = disk
        if self.stride > 1:
            view = view[(slice(None),) * self.axis + (slice(self.first, None, self.stride),)]
        if self.transposed:
            view = view.transpose(-2, -1)
        return view[(None,) * (len(self.box.sizes) - view.ndim)]


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face folder, which its parts cover."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    """Those that take turns follow each other."""

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> HFTensor:
        """The tensor that is one parameter of the same name."""
        return HFTensor(name, tuple(shape), (Part(name, ShardBox.full(shape), (0,) * len(shape)),))

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that it has parts of, in the order in which they first occur."""
        return tuple(dict.fromkeys(part.parameter for part in self.parts))

    @cached_property
    def groups(self) -> tuple[tuple[Part, ...], ...]:
        """The parts that take turns together; each of the others alone."""
        groups, at = [], 0
        while at < len(self.parts):
            groups.append(self.parts[at : at + self.parts[at].stride])
            at += self.parts[at].stride
        return tuple(groups)

    @property
    def transposed(self) -> HFTensor:
        """The same tensor with its last two dimensions the other way round on disk."""
        last = len(self.shape) - 1
        parts = [
            replace(
                part,
                offsets=_swapped(part.offsets),
                transposed=not part.transposed,
                axis=2 * last - 1 - part.axis if part.stride > 1 and part.axis >= last - 1 else part.axis,
            )
            for part in self.parts
        ]
        return HFTensor(self.name, _swapped(self.shape), tuple(parts))

    def assembled(self, value: Callable[[str], Tensor]) -> Tensor:
        """The tensor, of whole parameters by name; a parameter itself where that is all there is to it."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.is_plain and first.box.is_full:
            return value(first.parameter)
        whole: Tensor | None = None
        for part in self.parts:
            own = part.box.view_of(value(part.parameter))
            whole = own.new_empty(self.shape) if whole is None else whole
            part.view_of(part.on_disk(part.box, self.shape).view_of(whole)).copy_(own)
        assert whole is not None, f"{self.name}: has no parts"
        return whole


def _swapped(sides: tuple[int, ...]) -> tuple[int, ...]:
    return (*sides[:-2], sides[-1], sides[-2])
