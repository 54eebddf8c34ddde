"""Top-k, top-p and min-p: the tokens that they leave of each row, found among the likeliest.

b sequences · V vocabulary · W columns, likeliest first · K tokens that the filters left
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.inference.blocked_softmax import column, cumsum, likeliest
from danlu.inference.request import SamplingOptions
from danlu.inference.support import Support

# How many of the likeliest tokens are looked at first, how many times as many where these do not contain all that is
# kept, and from which part of the vocabulary on all of it is.
FIRST_WIDTH = 128
WIDER = 8
WHOLE = 1 / 8


@dataclass(frozen=True)
class Kept:
    """The tokens that filters left in each row, in vocabulary order; rows that have fewer than K end in -inf."""

    values: Tensor  # [b, K] float32
    ids: Tensor  # [b, K] int64
    counts: list[int]

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


def keep(scaled: Tensor, highest: Tensor, total: Tensor, options: Sequence[SamplingOptions]) -> Kept:
    """The tokens of each row of scaled [b, V] that its filters leave.

    Each filter keeps the tokens from a threshold up, so the result does not depend on the order of a sort.

    Args:
        highest: [b, 1], the maximum of each row.
        total: [b, 1] float64, of exp(scaled - highest).
    """
    vocab_size = scaled.shape[1]
    parts: list[tuple[list[int], Kept]] = []
    by_width = _first_widths(total, options, vocab_size)
    while by_width:
        width = min(by_width)
        rows = sorted(by_width.pop(width))  # those that were cut come after others, and all of them are taken whole
        whole = len(rows) == len(options)
        index = slice(None) if whole else torch.tensor(rows, device=scaled.device)
        members = [options[i] for i in rows]
        part = _keep_among(scaled[index], highest[index], total[index], members, width)
        parts.append((rows, part))
        # Where the last of them is kept, the next may have to be, too.
        if cut := [i for i, count in zip(rows, part.counts, strict=True) if 0 < width == count < vocab_size]:
            by_width.setdefault(_wider(width, vocab_size), []).extend(cut)
    return parts[0][1] if len(parts) == 1 else _combined(parts, len(options))


def _first_widths(total: Tensor, options: Sequence[SamplingOptions], vocab_size: int) -> dict[int, list[int]]:
    """Rows by how many of their likeliest tokens are looked at first; 0 where min-p alone gives the threshold."""
    by_width: dict[int, list[int]] = {}
    # No token adds more to the total than 1, so a nucleus has at least top_p x total of them.
    totals = total.squeeze(1).tolist() if any(option.top_p < 1 and not option.top_k for option in options) else None
    for i, option in enumerate(options):
        width = min(option.top_k + 1 if option.top_k else FIRST_WIDTH, vocab_size)
        if option.top_p < 1 and not option.top_k and totals is not None:
            while width < min(2 * option.top_p * totals[i], vocab_size):
                width = _wider(width, vocab_size)
        elif not option.top_k:
            width = 0
        by_width.setdefault(width, []).append(i)
    return by_width


def _wider(width: int, vocab_size: int) -> int:
    return vocab_size if width * WIDER > vocab_size * WHOLE else width * WIDER


def _keep_among(scaled: Tensor, highest: Tensor, total: Tensor, options: Sequence[SamplingOptions], width: int) -> Kept:
    """Filters as `keep` does, among the `width` likeliest tokens."""
    vocab_size = scaled.shape[1]
    if width == 0:
        return _from_threshold(scaled, highest + column([math.log(option.min_p) for option in options], scaled))
    if width == vocab_size:
        if scaled.device.type == "cpu":  # numpy sorts numbers alone, three times as fast as torch sorts there
            values = torch.from_numpy(-np.sort(-scaled.numpy(), axis=1))
        else:
            values = scaled.sort(dim=1, descending=True).values
        kept = _kept_columns(values, total, options)
        last = kept.sum(dim=1, keepdim=True) - 1
        return _from_threshold(scaled, values.gather(1, last.clamp_(min=0)))
    values, ids = likeliest(scaled, width)
    kept = _kept_columns(values, total, options)
    counts = kept.sum(dim=1).tolist()
    columns = max(1, *counts)
    outside = ~kept[:, :columns]
    ids, order = ids[:, :columns].masked_fill(outside, vocab_size).sort(dim=1)
    values = values[:, :columns].masked_fill(outside, float("-inf")).gather(1, order)
    return Kept(values, ids.clamp_(max=vocab_size - 1), counts)


def _from_threshold(scaled: Tensor, lowest: Tensor) -> Kept:
    """The tokens of each row of scaled [b, V] from lowest [b, 1] up."""
    inside = (scaled >= lowest) & (scaled > float("-inf"))
    in_row = inside.sum(dim=1)
    counts = in_row.tolist()
    rows, tokens = inside.nonzero(as_tuple=True)  # by row and token
    places = torch.arange(len(rows), device=rows.device) - (in_row.cumsum(0) - in_row)[rows]
    shape = (len(counts), max(1, *counts))
    values = torch.full(shape, float("-inf"), device=scaled.device)
    ids = torch.full(shape, scaled.shape[1] - 1, device=scaled.device)
    values[rows, places], ids[rows, places] = scaled[rows, tokens], tokens
    return Kept(values, ids, counts)


def _combined(parts: Sequence[tuple[list[int], Kept]], count: int) -> Kept:
    """Rows of several parts; of those that are in two the later one."""
    like = parts[0][1].values
    shape = (count, max(part.values.shape[1] for _, part in parts))
    values = torch.full(shape, float("-inf"), device=like.device)
    ids = torch.zeros(shape, dtype=torch.int64, device=like.device)
    counts = [0] * count
    for rows, part in parts:
        index = torch.tensor(rows, device=like.device)
        more = shape[1] - part.values.shape[1]
        values[index] = F.pad(part.values, (0, more), value=float("-inf"))
        ids[index] = F.pad(part.ids, (0, more))
        for i, kept in zip(rows, part.counts, strict=True):
            counts[i] = kept
    return Kept(values, ids, counts)


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
