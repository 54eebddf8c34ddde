"""Exchanges between context ranks, forward and backward: tokens for heads (Ulysses), and gathered rows.

T tokens of this rank · S tokens of all ranks of a group · H heads · C width of a head · U ranks of a group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from danlu.parallel.comm import Group


def dealt_heads(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Keys [T, K, C] and values [T, K, W] of as many heads as can be dealt to `size` ranks, with those that their query
    heads attend to: of fewer heads than ranks each goes to several."""
    if k.shape[1] % size == 0:
        return k, v
    assert size % k.shape[1] == 0, f"{k.shape[1]} key/value heads for {size} ranks, which `layout.problems` refuses"
    copies = size // k.shape[1]
    return k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)


def heads_of_all(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """All heads of this rank's tokens [T, H, C] -> this rank's heads of all tokens, [S, H/U, C], in the group's order.

    counts: tokens of each rank.
    """
    exchanged: Tensor = _Exchange.apply(x, group, counts, True)
    return exchanged


def tokens_of_all(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """The way back: this rank's heads of all tokens [S, H/U, W] -> all heads of this rank's tokens, [T, H, W]."""
    exchanged: Tensor = _Exchange.apply(x, group, counts, False)
    return exchanged


def rows_of_others(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """The rows [S - T, ..] that the other ranks of a group have, in the group's order; x [T, ..] are this rank's."""
    gathered: Tensor = _RowsOfOthers.apply(x, group, counts)
    return gathered


class _Exchange(torch.autograd.Function):
    """Tokens for heads or heads for tokens; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, counts: Sequence[int], to_heads: bool) -> Tensor:
        ctx.group, ctx.counts, ctx.to_heads = group, counts, to_heads
        return _to_heads(x, group, counts) if to_heads else _to_tokens(x, group, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        back = _to_tokens if ctx.to_heads else _to_heads
        return back(grad, ctx.group, ctx.counts), None, None, None


def _to_heads(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    tokens, size = len(x), group.size
    by_rank = x.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)  # [U*T, H/U, C]
    return group.all_to_all(by_rank, [tokens] * size, counts)


def _to_tokens(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    tokens, size = counts[group.index], group.size
    by_rank = group.all_to_all(x, counts, [tokens] * size)
    return by_rank.unflatten(0, (size, tokens)).transpose(0, 1).flatten(1, 2)


class _RowsOfOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        most = max(counts)
        filled = x.new_zeros(most, *x.shape[1:])  # gloo gathers equal sizes only
        filled[: len(x)] = x
        gathered = group.all_gather(filled)
        return torch.cat([gathered[start : start + count] for start, count in _places(group, counts)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        group, counts = ctx.group, ctx.counts
        wide = torch.promote_types(grad.dtype, torch.float32)  # in which the ranks' parts are summed
        filled = grad.new_zeros(group.size * max(counts), *grad.shape[1:], dtype=wide)
        own = 0
        for start, count in _places(group, counts):
            filled[start : start + count] = grad[own : own + count]
            own += count
        return group.reduce_scatter(filled)[: counts[group.index]].to(grad.dtype), None, None


def _places(group: Group, counts: Sequence[int]) -> list[tuple[int, int]]:
    """(first row among gathered ones, rows) of each rank but this one."""
    return [(index * max(counts), count) for index, count in enumerate(counts) if index != group.index]
