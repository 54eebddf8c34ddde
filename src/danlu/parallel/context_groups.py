"""The context ranks of a process as a grid, and the attention of a batch that may be the share of one of them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from danlu.core.layer_types import Attend
from danlu.core.types import Batch
from danlu.models.attend import attend_for
from danlu.parallel.comm import ALONE, Group
from danlu.parallel.ranks import Ranks

Transport = Literal["ring", "gather"]
"""The transport of keys to queries between ranks that have the same heads."""


@dataclass(frozen=True)
class ContextGroups:
    """The context ranks as a grid: context rank n is number n % U of its Ulysses group, and n // U of its ring."""

    ring: Group = field(default=ALONE)  # of ranks that have the same heads in attention
    ulysses: Group = field(default=ALONE)  # of neighbours, among which heads are dealt
    transport: Transport = "ring"

    @classmethod
    def of(cls, ranks: Ranks, method: str) -> ContextGroups:
        """Those of this process. method: `parallel.context.method`."""
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


def context_attend_for(
    batch: Batch,
    groups: ContextGroups,
    *,
    exact: bool = False,
    sends_expanded: bool = False,
    recomputed_layers: Container[int] = (),
) -> Attend:
    """`models.attend.attend_for` for a packed batch that may be the share of one context rank, filled up or not."""
    if not batch.shares:
        return attend_for(batch, exact=exact, recomputed_layers=recomputed_layers)
    from danlu.parallel.context_attention import ContextAttention

    assert not exact, "the recipe's rules refuse it"
    filler = len(batch.tokens) - batch.shares[groups.index].tokens
    return ContextAttention(
        batch.shares, groups, filler=filler, sends_expanded=sends_expanded, recomputed_layers=recomputed_layers
    )
