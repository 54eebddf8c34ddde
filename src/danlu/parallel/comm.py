"""The only file that calls collectives: operations of a group of processes, which do nothing in a group of one.

torch renames collectives between versions, and gloo lacks some (no uneven all-gather): both are dealt with here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.core.errors import DanluError

T = TypeVar("T")


@dataclass(frozen=True)
class PendingSum:
    """A tensor that is being all-reduced in place."""

    x: Tensor
    work: Any  # torch's Work; None where there is nothing to wait for

    def wait(self) -> Tensor:
        """Makes the present stream wait for the collective and returns the sum."""
        if self.work is not None:
            self.work.wait()
        return self.x


@dataclass(frozen=True)
class Group:
    """A process group: some ranks of the world, in an order that all of them know.

    It is a `danlu.core.layer_types.ReduceGroup`. A group of one sends nothing and needs no torch.distributed.
    """

    name: str = "alone"  # the axis of the layout, for messages and counts of traffic
    ranks: tuple[int, ...] = (0,)  # of the members, in the world
    index: int = 0  # of this process among the members: its rank in the group
    handle: Any = None  # torch's ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1

    def sum(self, x: Tensor) -> Tensor:
        """All-reduces x in place to its sum over the group, and returns it."""
        if not self.alone:
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.handle)
        return x

    def sum_async(self, x: Tensor) -> PendingSum:
        """Starts to all-reduce x in place to its sum over the group."""
        return PendingSum(x, None if self.alone else dist.all_reduce(x, group=self.handle, async_op=True))

    def max(self, x: Tensor) -> Tensor:
        """All-reduces x in place to its maximum over the group, and returns it."""
        if not self.alone:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.handle)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The members' tensors, all of one shape, stacked by rows in the group's order; new unless alone."""
        if self.alone:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]) if x.ndim else (self.size,))
        _all_gather(out, x.contiguous(), group=self.handle)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This process's rows [R / size, ..] of the sum of x [R, ..] over the group; R is a multiple of `size`."""
        if self.alone:
            return x
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows cannot be dealt out to {self.size} processes"
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        _reduce_scatter(out, x.contiguous(), group=self.handle)
        return out

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Rows of x [R, ..] to each member, and the rows that all of them give to this one, in the group's order.

        sends: how many rows of x go to each member, R in all; receives: how many come from each. Any may be zero.
        """
        if self.alone:
            return x
        assert sum(sends) == len(x), f"{sum(sends)} rows are to be sent, and {len(x)} are there"
        out = x.new_empty((sum(receives), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(receives), list(sends), group=self.handle)
        return out

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every member's value, in the group's order. Values travel as pickles between processes of this run."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def broadcast_object(self, value: T, source: int) -> T:
        """The value of member `source`, on all members. It travels as a pickle between processes of this run."""
        if self.alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.ranks[source], group=self.handle)
        return values[0]

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every member's bytes, of any length, in the group's order."""
        if self.alone:
            return [payload]
        sizes = self.all_gather(torch.tensor([len(payload)])).tolist()
        if not max(sizes):
            return [b""] * self.size
        padded = torch.zeros(1, max(sizes), dtype=torch.uint8)  # gloo gathers equal sizes only
        padded[0, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else 0
        rows = self.all_gather(padded).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every member's value in the group's order on the first member, and an empty list on the others."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size if self.index == 0 else []
        dist.gather_object(value, values if self.index == 0 else None, dst=self.ranks[0], group=self.handle)
        return values

    def from_first(
        self, make: Callable[[], T], *, again: bool = False, barrier: Callable[[], None] = lambda: None
    ) -> T:
        """The value that `make` returns on the first member, on all of them; a DanluError there is raised on all.

        again: the others call `make` too, once the first is done; for work that the first leaves on disk.
        barrier: returns when all have come to it; for work that takes longer than a collective may.
        """
        if self.alone:
            return make()
        value, error = None, None
        if self.index == 0:
            try:
                value = make()
            except DanluError as problem:
                error = problem
        barrier()
        first_value, error = self.all_gather_objects((None if again else value, error))[0]
        if error is not None:
            raise error
        if not again:
            return first_value  # type: ignore[no-any-return]
        return value if value is not None and self.index == 0 else make()

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Sends and receives point to point, all at once; returns when everything has arrived.

        sends: (tensor, index of the member that it goes to). receives: (tensor that is overwritten, index of the member
        that it comes from). Both ends know every size: an empty tensor is neither sent nor waited for.
        """
        self.start_exchange(sends, receives)()

    def start_exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        """Starts an `exchange` and returns a function that waits until everything has arrived.

        Until then nothing of `receives` may be read, and nothing of `sends` changed. Messages between two members
        arrive in the order in which they were sent.
        """
        moves = [dist.P2POp(dist.isend, x, self.ranks[to], self.handle) for x, to in sends if x.numel()]
        moves += [dist.P2POp(dist.irecv, x, self.ranks[source], self.handle) for x, source in receives if x.numel()]
        works = dist.batch_isend_irecv(moves) if moves else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


ALONE = Group()


def world_size() -> int:
    """Processes of this run; 1 where torch.distributed is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def new_group(name: str, ranks: Sequence[int], *, backend: str | None = None) -> Group:
    """A new process group, with its own order of collectives. Every process of the world calls this, in one order.

    A process that is not in `ranks` gets a group with index -1.
    """
    rank = dist.get_rank()
    handle = dist.new_group(list(ranks), backend=backend)
    return Group(name, tuple(ranks), ranks.index(rank) if rank in ranks else -1, handle)


def subgroup_of(group: Group, size: int) -> Group:
    """The subgroup of this process where `group` is divided into subgroups of `size` consecutive members.

    Every process of the world calls this, each with its own group along one axis.
    """
    world = Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    own: Group | None = None
    for ranks in sorted(set(world.all_gather_objects(group.ranks))):
        for start in range(0, len(ranks), size):
            subgroup = new_group(group.name, ranks[start : start + size])
            own = subgroup if world.index in subgroup.ranks else own
    assert own is not None, "a process is in its own group"
    return own


# torch 2.13 renames these two; 2.11 has the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
