"""The only file that calls collectives: what a group of processes does together, and nothing when it is one.

torch renames collectives between versions, and gloo lacks some (no uneven all-gather): both are dealt with here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.errors import DanluError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Some processes, in an order that all of them know. Satisfies `danlu.types.ReduceGroup`.

    A group of one sends nothing and needs no torch.distributed.
    """

    name: str = "alone"  # the axis of the layout, for messages and counts of traffic
    ranks: tuple[int, ...] = (0,)  # in the world
    index: int = 0  # of this process among them
    handle: Any = None  # torch's ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1

    def sum(self, x: Tensor) -> Tensor:
        """x becomes its sum over the group."""
        if not self.alone:
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.handle)
        return x

    def all_reduce_async(self, x: Tensor) -> torch.futures.Future[Tensor]:
        """x, once it has become its sum over the group."""
        work = dist.all_reduce(x, dist.ReduceOp.SUM, group=self.handle, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def max(self, x: Tensor) -> Tensor:
        """x becomes its maximum over the group."""
        if not self.alone:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.handle)
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The group's tensors, all of one shape, one behind the other along `dim`, in the group's order."""
        if self.alone:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]) if x.ndim else (self.size,))
        _all_gather(out, x.contiguous(), group=self.handle)
        return out if dim == 0 else torch.cat(out.chunk(self.size), dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This process's share, by rows, of the sum of x over the group; the number of rows is a multiple of `size`."""
        if self.alone:
            return x
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows cannot be dealt out to {self.size} processes"
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        _reduce_scatter(out, x.contiguous(), group=self.handle)
        return out

    def all_gather_objects(self, value: Any) -> list[Any]:
        """What each member gave, in order. Values travel as pickles between processes that this run has started."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.handle)
        return found

    def gather_objects(self, value: Any) -> list[Any]:
        """What each member gave, in order, to the first member; an empty list to the others."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size if self.index == 0 else []
        dist.gather_object(value, found if self.index == 0 else None, dst=self.ranks[0], group=self.handle)
        return found

    def from_first(
        self, make: Callable[[], T], *, again: bool = False, barrier: Callable[[], None] = lambda: None
    ) -> T:
        """What the first member makes, on all of them; an error of danlu's there is an error everywhere.

        again: the others make it themselves, once the first has; for what finds the first one's work on disk.
        barrier: returns when all have come to it; for what takes longer than a collective may.
        """
        if self.alone:
            return make()
        made, error = None, None
        if self.index == 0:
            try:
                made = make()
            except DanluError as problem:
                error = problem
        barrier()
        sent, error = self.all_gather_objects((None if again else made, error))[0]
        if error is not None:
            raise error
        if not again:
            return sent  # type: ignore[no-any-return]
        return made if made is not None and self.index == 0 else make()

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Point to point, all at once: (what, to which member), and (into what, from which member).

        Both ends know every size: an empty tensor is not sent, and nothing waits for it.
        """
        moves = [dist.P2POp(dist.isend, x, self.ranks[to], self.handle) for x, to in sends if x.numel()]
        moves += [dist.P2POp(dist.irecv, x, self.ranks[source], self.handle) for x, source in receives if x.numel()]
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()


ALONE = Group()


def world_size() -> int:
    """Processes of this run; 1 where torch.distributed has not been begun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def new_group(name: str, ranks: Sequence[int], *, backend: str | None = None) -> Group:
    """A group of its own, with its own queue of collectives; every process of the world calls this, in one order."""
    rank = dist.get_rank()
    handle = dist.new_group(list(ranks), backend=backend)
    return Group(name, tuple(ranks), ranks.index(rank) if rank in ranks else -1, handle)


def within(group: Group, size: int) -> Group:
    """The part of this process among parts of a group, of so many members in a row; the whole world calls this."""
    world = Group("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    mine: Group | None = None
    for ranks in sorted(set(world.all_gather_objects(group.ranks))):
        for start in range(0, len(ranks), size):
            made = new_group(group.name, ranks[start : start + size])
            mine = made if world.index in made.ranks else mine
    assert mine is not None, "a process is in its own group"
    return mine


# torch 2.13 renames these two; 2.11 has the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
