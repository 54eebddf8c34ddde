"""Top-k, top-p and min-p: the tokens that they leave of each row, found among the likeliest.

b sequences · V vocabulary · W columns, likeliest first · K tokens that the filters left
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.rollout.blocked_softmax import column, cumsum, likeliest
from danlu.rollout.request import SamplingOptions
from danlu.rollout.support import Support

# How many of the likeliest tokens top-p and min-p consider at first, and how many times as many where these do not
# contain all that is kept.
FIRST_WIDTH = 128
WIDER = 8


@dataclass(frozen=True)
class Kept:
    """The tokens that filters left in each row, in vocabulary order; rows that have fewer than K end in -inf."""

    values: Tensor  # [b, K] float32
    ids: Tensor  # [b, K] int64
    counts: list[int]

    def replaced(self, index: Tensor, others: Kept) -> Kept:
        """With the rows index [n] as in `others`, which has as many columns or more."""
        more = others.values.shape[1] - self.values.shape[1]
        values, ids = F.pad(self.values, (0, more), value=float("-inf")), F.pad(self.ids, (0, more))
        values[index], ids[index] = others.values, others.ids
        counts = list(self.counts)
        for i, count in zip(index.tolist(), others.counts, strict=True):
            counts[i] = count
        return Kept(values, ids, counts)

    @property
    def lowest(self) -> Tensor:
        """[b, 1], the smallest logit that was kept."""
        return self.values.masked_fill(self.values == float("-inf"), float("inf")).amin(dim=1, keepdim=True)

    def supports(self, vocab_size: int) -> list[Support | None]:
        ids = self.ids.cpu().numpy()
        return [
            Support.of(row[:count], vocab_size) if count < vocab_size else None
            for row, count in zip(ids, self.counts, strict=True)
        ]


def keep(scaled: Tensor, total: Tensor, options: Sequence[SamplingOptions], width: int) -> Kept:
    """The tokens of each row of scaled [b, V] that its filters leave.

    Each filter keeps the tokens from a threshold up, so the result does not depend on the order of a sort.

    Args:
        total: [b, 1] float64, of exp(scaled - its maximum).
        width: so many of the likeliest are looked at first; more of rows whose last one is kept.
    """
    vocab_size = scaled.shape[1]
    values, ids = likeliest(scaled, width)
    kept = _kept_columns(values, total, options)
    counts = kept.sum(dim=1).tolist()
    columns = max(1, *counts)
    outside = ~kept[:, :columns]
    ids, order = ids[:, :columns].masked_fill(outside, vocab_size).sort(dim=1)
    values = values[:, :columns].masked_fill(outside, float("-inf")).gather(1, order)
    result = Kept(values, ids.clamp_(max=vocab_size - 1), counts)
    # Where the last column is kept, the next may have to be, too.
    cut = [i for i, count in enumerate(counts) if count == width < vocab_size]
    if not cut:
        return result
    index = torch.tensor(cut, device=scaled.device)
    wider = min(width * WIDER, vocab_size)
    return result.replaced(index, keep(scaled[index], total[index], [options[i] for i in cut], wider))


def _kept_columns(values: Tensor, total: Tensor, options: Sequence[SamplingOptions]) -> Tensor:
    """[b, W] bool, given each row's likeliest logits [b, W], falling: True up to a column of each row."""
    kept = values > float("-inf")
    width = values.shape[1]
    if any(option.top_k for option in options):
        last = [min(option.top_k or width, width) - 1 for option in options]
        kept &= values >= values.gather(1, torch.tensor(last, device=values.device).unsqueeze(1))
    if any(option.top_p < 1 for option in options):
        exp = torch.where(kept, values - values[:, :1], float("-inf")).exp_()
        cumulative = cumsum(exp)
        # Top-p is of what top-k left, where there is a top-k.
        filtered = torch.tensor([[option.top_k > 0] for option in options], device=values.device)
        total = torch.where(filtered, cumulative[:, -1:], total)
        top_p = column([option.top_p if option.top_p < 1 else math.inf for option in options], values, torch.float64)
        inside = cumulative - exp < top_p * total  # what lies above a token is less than top_p
        last_inside = inside.sum(dim=1, keepdim=True) - 1
        kept &= values >= values.gather(1, last_inside.clamp_(min=0))
    if any(option.min_p > 0 for option in options):
        log_min_p = [math.log(option.min_p) if option.min_p > 0 else -math.inf for option in options]
        kept &= values >= values[:, :1] + column(log_min_p, values)
    return kept
