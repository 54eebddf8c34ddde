"""The context ranks of a process as a grid, and the attention of a batch that is the share of one of them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from danlu.core.types import Batch
from danlu.parallel.comm import Group
from danlu.parallel.ranks import Ranks

if TYPE_CHECKING:
    from danlu.parallel.context_attention import ContextAttention

Transport = Literal["ring", "gather"]
"""The transport of keys to queries between ranks that have the same heads."""


@dataclass(frozen=True)
class ContextGroups:
    """The context ranks as a grid: context rank n is number n % U of its Ulysses group, and n // U of its ring."""

    ring: Group  # of ranks that have the same heads in attention
    ulysses: Group  # of neighbours, among which heads are dealt
    transport: Transport = "ring"

    @classmethod
    def of(cls, ranks: Ranks, method: str) -> ContextGroups | None:
        """Those of this process; None where no packs are cut. method: `parallel.context.method`."""
        if ranks.layout.context == 1:
            return None
        return cls(ranks.ring, ranks.ulysses, "gather" if method == "gather" else "ring")

    @property
    def size(self) -> int:
        """Context ranks."""
        return self.ring.size * self.ulysses.size

    def sum(self, x: Tensor) -> Tensor:
        """x, summed in place over all of them."""
        return self.ring.sum(self.ulysses.sum(x))

    @property
    def index(self) -> int:
        """Number of this process among them."""
        return self.ring.index * self.ulysses.size + self.ulysses.index

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of x over all context ranks, a new tensor; its gradient is the sum of the ranks'
        gradients.
        """
        reduced: Tensor = _AllReduce.apply(x, self)
        return reduced

    def attend_for(
        self, batch: Batch, *, sends_expanded: bool = False, recomputed_layers: Container[int] = ()
    ) -> ContextAttention:
        """The attention of a batch that is the share of this context rank, filled up or not."""
        from danlu.parallel.context_attention import ContextAttention

        filler = len(batch.tokens) - batch.shares[self.index].tokens
        return ContextAttention(
            batch.shares, self, filler=filler, sends_expanded=sends_expanded, recomputed_layers=recomputed_layers
        )


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: ContextGroups) -> Tensor:
        ctx.groups = groups
        return _sum_over(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum_over(grad, ctx.groups), None


def _sum_over(x: Tensor, groups: ContextGroups) -> Tensor:
    return groups.sum(x.clone(memory_format=torch.contiguous_format))
