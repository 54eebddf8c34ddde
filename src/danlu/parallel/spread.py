"""How one process takes part in a step that many share: its packs, its micro-batches, and the sums over all of them.

Alone, everything here does nothing. A step is the same number of micro-batches on each process, for each makes the same
collectives; where a process has fewer packs than another, it goes through one that has no targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from danlu.parallel.comm import Group
from danlu.parallel.held import Held
from danlu.parallel.ranks import Ranks

T = TypeVar("T")


@dataclass
class Spread:
    """A process among `ranks`, with what it holds of the parameters."""

    ranks: Ranks = field(default_factory=Ranks)
    held: Mapping[str, Held] = field(default_factory=dict)
    sums: Sequence[tuple[Group, str]] = ()
    """Gradients, by parameter name, that are parts of a sum over a group after the backward pass."""
    begin: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext()
    """Called around a micro-batch, with whether it is the step's last."""
    forget: Callable[[], None] = lambda: None
    """Drops whole parameters that were gathered from shards, after the shards have changed outside of a step."""

    put_away: Callable[[], None] = lambda: None
    """Lets go of parameters that lie in a file, once an update or a checkpoint has gone through them."""

    @property
    def alone(self) -> bool:
        return self.ranks.alone

    def own(self, packs: Sequence[T]) -> range:
        """Which of a step's packs this process takes."""
        data = self.ranks.data
        return range(len(packs) * data.index // data.size, len(packs) * (data.index + 1) // data.size)

    def rounds(self, packs: int, micro: int) -> int:
        """Micro-batches of so many packs that every process makes of a step of `packs`."""
        size = self.ranks.data.size
        most = max(packs * (index + 1) // size - packs * index // size for index in range(size))
        return -(-most // micro)

    def total(self, values: Tensor) -> Tensor:
        """[n] numbers summed over the processes that take other rows, in place."""
        return self.ranks.data.sum(values)

    def any(self, fact: bool) -> bool:
        """Whether it is a fact on any process; all of them ask."""
        if self.alone:
            return fact
        return bool(self.ranks.world.max(torch.tensor([float(fact)])).item())

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward pass: gradients are whole sums, in the local parameters."""
        if self.alone:
            return
        for one in self.held.values():
            one.take_gradient()
        # Shards that are offloaded have theirs on the host, and what is not sharded has them on the device.
        by_group: dict[tuple[int, torch.device], tuple[Group, list[Tensor]]] = {}
        for group, name in self.sums:
            if (grad := self.held[name].local.grad) is not None:
                by_group.setdefault((id(group), grad.device), (group, []))[1].append(grad)
        for group, grads in by_group.values():
            _sum_together(group, grads)

    def shares(self) -> dict[Tensor, float]:
        """For the global norm: local parameter -> what of its gradient's square counts here."""
        return {one.local: 1 / one.piece.copies for one in self.held.values()}


def _sum_together(group: Group, grads: Sequence[Tensor]) -> None:
    """One collective for many small tensors."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    group.sum(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
