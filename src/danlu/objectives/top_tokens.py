"""The likeliest K tokens of a distribution, and the mass of all others as one more outcome.

K tokens alone are no distribution: renormalised, a teacher that is sure of nothing looks sure of them, and the policy
learns to give the rest of the vocabulary no mass at all. The mass of the others is summed as it is, from their own
logits. It is never computed as 1 less K probabilities: where they leave little, float32 has no digits of the
difference.

N targets · D model width · V vocabulary · K tokens · S rows of the vocabulary in a slice
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from danlu.core.layer_types import ReduceGroup
from danlu.core.types import TopTokens
from danlu.objectives.divergence import Head
from danlu.objectives.loss_memory import rows_per_slice
from danlu.objectives.vocab_slices import HeadGradients, VocabSlice, VocabSlices


@torch.no_grad()
def top_tokens(
    head: Head,
    k: int,
    *,
    temperature: float = 1.0,
    slice_rows: int | None = None,
    tensor_group: ReduceGroup | None = None,
    vocab_start: int = 0,
) -> TopTokens:
    """The K likeliest tokens at each target under softmax(logits / temperature), likeliest first, and all others.

    K must be smaller than V. Where the vocabulary is cut, the weight is the rows from `vocab_start` on, and the result
    is that of the whole vocabulary on each process of `tensor_group`.
    """
    hidden = head.hidden
    wide = torch.promote_types(hidden.dtype, torch.float32)
    best = hidden.new_full((len(hidden), k), float("-inf"), dtype=wide)
    ids = torch.zeros(best.shape, dtype=torch.int64, device=hidden.device)
    others = torch.full_like(best[:, 0], float("-inf"))  # [N] log of the sum of exp(z) of those that are not among K
    slices = head.slices(slice_rows or rows_per_slice(len(hidden), hidden.device.type))
    for part in slices:
        z = slices.logits(part, wide).div_(temperature)  # [N, S]
        first = vocab_start + part.start
        own = torch.arange(first, first + z.shape[1], device=hidden.device).expand_as(z)
        best, ids, others = _likeliest(torch.cat((best, z), 1), torch.cat((ids, own), 1), others, k)
    if tensor_group is not None and len(hidden):
        gathered = tensor_group.all_gather(torch.cat((best, others.unsqueeze(1)), 1).unsqueeze(0))  # [tp, N, K + 1]
        everyones_ids = torch.cat(tuple(tensor_group.all_gather(ids.unsqueeze(0))), 1)  # [N, tp K]
        everyones = torch.cat(tuple(gathered[..., :-1]), 1)
        best, ids, others = _likeliest(everyones, everyones_ids, gathered[..., -1].logsumexp(0), k)
    return TopTokens(ids, torch.cat((best, others.unsqueeze(1)), 1).log_softmax(1))


def _likeliest(candidates: Tensor, ids: Tensor, others: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of candidates [N, C], their ids, and the log of the others' mass with that of the rest [N]."""
    best, places = candidates.topk(k, dim=1)
    rest = candidates.scatter(1, places, float("-inf")).logsumexp(1)
    return best, ids.gather(1, places), torch.logaddexp(others, rest)


def logprobs_of_tokens(
    head: Head,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    slice_rows: int | None = None,
    tensor_group: ReduceGroup | None = None,
    vocab_start: int = 0,
) -> Tensor:
    """Log-probabilities [N, K + 1] of tokens `ids` [N, K] at each target, and last of all others together.

    float32 (float64 for float64 hidden states), differentiable by hidden states and weight. The ids of a target differ
    from one another. tensor_group, vocab_start: as in `token_logprobs`.
    """
    slice_rows = slice_rows or rows_per_slice(len(ids), ids.device.type)
    grouped = _GroupedLogits.apply(
        head.hidden, head.weight, head, ids, temperature, slice_rows, tensor_group, vocab_start
    )
    logprobs: Tensor = grouped.log_softmax(1)
    return logprobs


class _GroupedLogits(torch.autograd.Function):
    """z at each id, and the log of the sum of exp(z) of all other tokens: [N, K + 1], with z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: Head,
        ids: Tensor,
        temperature: float,
        slice_rows: int,
        group: ReduceGroup | None,
        vocab_start: int,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        slices = head.slices(slice_rows)
        at_ids = torch.zeros(ids.shape, dtype=wide, device=ids.device)
        # The lowest number and not -inf: a slice may have no other token.
        highest = torch.full((len(ids),), torch.finfo(wide).min, dtype=wide, device=ids.device)
        mass = torch.zeros_like(highest)
        for part, columns, inside in _columns(slices, ids, vocab_start):
            z = slices.logits(part, wide).div_(temperature)  # [N, S]
            at_ids += z.gather(1, columns).masked_fill_(~inside, 0)
            z.masked_fill_(_chosen(columns, inside, z.shape[1]), float("-inf"))
            raised = torch.maximum(highest, z.amax(1))
            mass.mul_((highest - raised).exp_()).add_(z.sub_(raised.unsqueeze(1)).exp_().sum(1))
            highest = raised
        if group is not None and len(ids):
            local, highest = highest, group.max(highest.clone())
            mass = mass * (local - highest).exp_()
            both = group.sum(torch.cat((at_ids, mass.unsqueeze(1)), 1))
            at_ids, mass = both[:, :-1], both[:, -1]
        others = highest + mass.log()
        ctx.slices, ctx.temperature, ctx.vocab_start = slices, temperature, vocab_start
        ctx.save_for_backward(hidden, weight, ids, others)
        return torch.cat((at_ids, others.unsqueeze(1)), 1)

    @staticmethod
    def backward(ctx: Any, by_group: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *_, ids, others = ctx.saved_tensors
        slices: VocabSlices = ctx.slices
        gradients = HeadGradients(slices, others.dtype, for_head=ctx.needs_input_grad[1])
        for part, columns, inside in _columns(slices, ids, ctx.vocab_start):
            capped = slices.logits(part, others.dtype)  # [N, S]
            grad = (capped / ctx.temperature).sub_(others.unsqueeze(1))
            grad.masked_fill_(_chosen(columns, inside, grad.shape[1]), float("-inf")).exp_()
            grad.mul_(by_group[:, -1:]).scatter_add_(1, columns, by_group[:, :-1].masked_fill(~inside, 0))
            gradients.add(part, grad.div_(ctx.temperature), capped)
        return gradients.hidden, gradients.head, *[None] * 6


def _columns(slices: VocabSlices, ids: Tensor, vocab_start: int) -> Iterator[tuple[VocabSlice, Tensor, Tensor]]:
    """Slice by slice, the column [N, K] of each id in it (any if it is in another slice), and whether it is there."""
    for part in slices:
        columns, count = ids - (vocab_start + part.start), part.head.shape[0]
        inside = (columns >= 0) & (columns < count)
        yield part, columns.clamp_(0, count - 1), inside


def _chosen(columns: Tensor, inside: Tensor, count: int) -> Tensor:
    """[N, count] bool: which columns of a slice are among those of the ids."""
    chosen = torch.zeros(len(columns), count + 1, dtype=torch.bool, device=columns.device)  # the last: in other slices
    return chosen.scatter_(1, columns.masked_fill(~inside, count), True)[:, :count]
