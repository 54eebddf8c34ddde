"""Gathering tensors, or boxes of them, on the first process from the boxes of all, one at a time: for a result in one
folder.

The model is never gathered as a whole: in addition to its own boxes the first process holds the tensor it asked for,
and one part of that.
Everything travels through host memory, so the group needs gloo and a GPU needs no room.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from danlu.core.shard_box import ShardBox, find_gap
from danlu.parallel.comm import Group
from danlu.training.agreement import Failure

_MAX_DIMS = 8  # that a header has room for
_NOTHING, _SENDS, _FAILED = range(3)


class Gathering:
    """A context in which all processes of a group ask for the same tensors in one order, and the first gets them.

    An error of the first, which does more than the others (it writes files), is raised on all, at the next tensor or at
    the end: nobody waits for a tensor that is never asked for.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def first(self) -> bool:
        """Whether this process is the one that gets the tensors."""
        return self.group.index == 0

    def whole(self, name: str, local: Tensor, box: ShardBox | None) -> Tensor | None:
        """The whole tensor on the first process: on the CPU, or `local` itself where that is all of it; else None.

        box: the box that `local` is; None for one that is whole and the same on all processes.
        Raises CheckpointError on all when the first process failed; AssertionError if the boxes are not the whole.
        """
        return self.part(name, local, box, None)

    def part(self, name: str, local: Tensor, box: ShardBox | None, wanted: ShardBox | None) -> Tensor | None:
        """A box of a tensor, as `whole` gives all of it; nothing else of the tensor travels. wanted: None for all."""
        if self.group.alone or box is None or (box.is_full and box.replicas == self.group.size):
            if not self.first:
                return None
            return local.detach() if wanted is None or wanted.is_full else wanted.view_of(local.detach())
        assert local.ndim <= _MAX_DIMS, f"{name} has {local.ndim} dimensions"
        wanted = wanted or ShardBox.full(box.global_shape)
        own = box.intersection(wanted) if box.is_writer else None
        headers = self._exchange_headers(_NOTHING if own is None else _SENDS, own or box)
        own_part = None if own is None else own.relative_to(box).view_of(local.detach())
        if not self.first:
            if own_part is not None:
                self.group.exchange([(own_part.cpu().contiguous(), 0)], [])
            return None
        gathered = torch.empty(wanted.sizes, dtype=local.dtype)
        sent_boxes = {
            member: _box(header, box.global_shape) for member, header in enumerate(headers) if header[0] == _SENDS
        }
        # One after the other, in the order of ranks: only one part is in memory next to the whole.
        for member, part_box in sent_boxes.items():
            part = own_part if member == 0 else torch.empty(part_box.sizes, dtype=local.dtype)
            assert part is not None, "its header says that the first process has a part"
            if member:
                self.group.exchange([], [(part, member)])
            part_box.relative_to(wanted).view_of(gathered).copy_(part)
        gap = find_gap(wanted.sizes, [part_box.relative_to(wanted) for part_box in sent_boxes.values()])
        assert gap is None, f"{name}: {gap} of {wanted} of {list(box.global_shape)} is sent by no process"
        return gathered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nothing = ShardBox.full(())
        if self.group.alone:
            return
        if error is None:
            self._exchange_headers(_NOTHING, nothing)
        elif self.first and isinstance(error, Exception):  # an interrupt ends this process, and the others notice
            with suppress(RuntimeError):  # of torch, where another process has gone: that is the error then
                self._exchange_headers(_FAILED, nothing)
                self.group.all_gather_objects(Failure.of(error))

    def _exchange_headers(self, state: int, box: ShardBox) -> list[list[int]]:
        """Returns the headers of all processes for a tensor, as [state, offsets, sizes], on all of them.

        Raises the error of the first process on the others.
        """
        # Padded to one length: all_gather takes tensors of one shape, and the first process may have failed already.
        pad = [0] * (_MAX_DIMS - len(box.offsets))
        header = torch.tensor([[state, *box.offsets, *pad, *box.sizes, *pad]])
        headers: list[list[int]] = self.group.all_gather(header).tolist()
        if headers[0][0] == _FAILED and not self.first:
            failure: Failure = self.group.all_gather_objects(None)[0]
            raise failure.kind(f"rank {self.group.ranks[0]}: {failure.text}")
        return headers


def _box(header: list[int], global_shape: tuple[int, ...]) -> ShardBox:
    ndim = len(global_shape)
    offsets, sizes = header[1 : 1 + ndim], header[1 + _MAX_DIMS : 1 + _MAX_DIMS + ndim]
    return ShardBox(global_shape, tuple(offsets), tuple(sizes))
