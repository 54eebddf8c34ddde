"""Attention in blocks of query rows, by matrix products: for short documents, and for windows and softcaps of any
length.

T packed tokens · H query heads · K key/value heads · G = H / K queries a key/value head serves · C head width
W width of a value · B rows of a query block, filled up · L keys such a block sees
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from danlu.models.kernel_limits import BLOCK_ROWS, ROW_MULTIPLE
from danlu.models.segments import Range, Segment


@dataclass(frozen=True)
class BlockSettings:
    segments: tuple[Segment, ...]  # in k and v; their queries are those of q, in order
    scale: float
    window: int | None
    softcap: float | None
    query_blocks: tuple[QueryBlock, ...] = ()
    """The blocks of q where these are not those of segments."""

    @property
    def first_query(self) -> int:
        """The index of the first row of q in k and v."""
        return self.segments[0].start

    @cached_property
    def blocks(self) -> tuple[QueryBlock, ...]:
        """All blocks of query rows, in order."""
        if self.query_blocks:
            return self.query_blocks
        blocks: list[QueryBlock] = []
        for segment in self.segments:
            window = None if self.window is None or self.window >= segment.path_length else self.window
            for start in range(segment.start, segment.stop, BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, segment.stop)
                rows = slice(start - self.first_query, stop - self.first_query)
                blocks.append(QueryBlock(rows, segment.keys_of_any(start, stop, window), segment.before > 0, window))
        return tuple(blocks)


@dataclass(frozen=True)
class QueryBlock:
    """Query rows of one segment and the ranges of keys they see, of which the last ends at the last row.

    Rows are filled up with zeros at the end to B = `rows`, and keys by as many. The keys of a branch are filled up
    before the first one too: a stem may have any length, and every new shape of product costs time and memory
    (see `kernel_limits.DOCUMENT_MULTIPLE`).
    """

    real: slice  # of q
    ranges: tuple[Range, ...]  # of k and v
    is_branch: bool
    window: int | None
    unseen: Tensor | None = None
    """[rows, keys] bool, without those that fill up: the keys that rows do not see, where it is not by their order."""

    @cached_property
    def rows(self) -> int:
        return -(-self._count // ROW_MULTIPLE) * ROW_MULTIPLE

    @cached_property
    def filled_before(self) -> int:
        """Keys before the first one, which no query sees."""
        return -self._end % ROW_MULTIPLE if self.is_branch else 0

    @cached_property
    def _count(self) -> int:
        return int(self.real.stop - self.real.start)

    @cached_property
    def _end(self) -> int:
        """The number of keys, with the rows that fill up behind them."""
        return sum(stop - start for start, stop in self.ranges) + self.rows - self._count

    def queries(self, x: Tensor) -> Tensor:
        """[B, ...]: rows of x [queries, ...], then zeros."""
        return _filled(x, [(self.real.start, self.real.stop)], 0, self.rows)

    def keys(self, x: Tensor) -> Tensor:
        """Returns the rows of x [T, ...] for this block, [L, ...], filled up with zeros.

        The rows of x in their place belong to another document, and may be NaN.
        """
        return _filled(x, self.ranges, self.filled_before, self.filled_before + self._end)

    def add_to(self, total: Tensor, of_keys: Tensor) -> None:
        """Adds values of this block's keys, [K, L, C], to those of all, [K, T, C]; the rows that fill up are
        left out.
        """
        place = self.filled_before
        for start, stop in self.ranges:
            total[:, start:stop] += of_keys[:, place : place + stop - start]
            place += stop - start

    def hide(self, scores: Tensor) -> None:
        """Sets the scores [.., B, L] of keys that queries do not see to -inf."""
        if self.filled_before:
            scores[..., : self.filled_before] = float("-inf")
        scores = scores[..., self.filled_before :]
        if self.unseen is None:
            _hide(scores, self.window)
            return
        rows, keys = self.unseen.shape
        scores[..., :rows, :keys].masked_fill_(self.unseen, float("-inf"))
        scores[..., :rows, keys:] = float("-inf")


def _filled(x: Tensor, ranges: Sequence[Range], before: int, size: int) -> Tensor:
    """[size, ...]: `before` zeros, the rows of x [.., ...] in `ranges`, and zeros again."""
    start, stop = ranges[0]
    if len(ranges) == 1 and size == stop - start:
        return x[start:stop]
    filled = x.new_zeros(size, *x.shape[1:])
    place = before
    for start, stop in ranges:
        filled[place : place + stop - start] = x[start:stop]
        place += stop - start
    return filled


class BlockAttention(torch.autograd.Function):
    """Attention as matrix products over blocks of query rows, each against only the keys it can see.

    Rows that fill a block up see everything and are thrown away; as keys they are hidden from every real row, since
    they come after it. Scores, softcap and softmax are in float32: where scores are large, bfloat16 goes in steps of an
    eighth. Probabilities are kept for the backward pass, in the dtype of q: two bytes a score in bfloat16, the same
    that one written-out attention would keep, less the blocks above the diagonal or outside the window. Recomputing
    them there takes a fifth to two fifths longer, forward and backward together. With sinks, probabilities are smaller
    by the sink's, which is needed too: a number a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        settings: BlockSettings,
        sinks: Tensor | None = None,
        recomputed: bool = False,
    ) -> Tensor:
        """q [queries, H, C], k [T, K, C], v [T, K, W], sinks [H] -> [queries, H, W].

        recomputed: probabilities are not kept for the backward pass, which computes them again, to the same bits.
        """
        grouped = q.unflatten(1, (k.shape[1], -1))  # [T, K, G, C]
        out = q.new_empty(*q.shape[:2], v.shape[2])
        kept: list[Tensor] = []
        for block in settings.blocks:
            weights = _weights_of(block, settings, grouped, k, sinks)
            if not recomputed:
                kept += weights.tensors
            out[block.real] = _by_token(torch.bmm(weights.probabilities, block.keys(v).transpose(0, 1)), block)
        ctx.settings, ctx.has_sinks, ctx.recomputed = settings, sinks is not None, recomputed
        ctx.save_for_backward(q, k, v, *(() if sinks is None else (sinks,)), *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *saved = ctx.saved_tensors
        settings: BlockSettings = ctx.settings
        sinks = saved.pop(0) if ctx.has_sinks else None
        kv_heads = k.shape[1]
        groups = q.shape[1] // kv_heads
        grouped, grad_grouped = (x.unflatten(1, (kv_heads, groups)) for x in (q, grad))  # [T, K, G, C]
        wide = torch.promote_types(q.dtype, torch.float32)  # blocks are summed in float32
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (x.new_zeros(kv_heads, *x.shape[::2], dtype=wide) for x in (k, v))  # [K, T, C or W]
        grad_sinks = None if sinks is None else q.new_zeros(kv_heads, groups, dtype=wide)
        kept = iter(saved)
        for block in settings.blocks:
            if ctx.recomputed:
                weights = _weights_of(block, settings, grouped, k, sinks)
            else:
                weights = _Weights.taken_from(kept, settings.softcap is not None, sinks is not None)
            probabilities = weights.probabilities
            keys, values = (block.keys(x).transpose(0, 1) for x in (k, v))  # [K, L, C or W]
            grad_out = by_head(block.queries(grad_grouped))  # [K, G*B, C]
            # Blocks share keys, so grad_k and grad_v are sums over blocks.
            block.add_to(grad_v, torch.bmm(probabilities.transpose(1, 2), grad_out))
            grad_probabilities = torch.bmm(grad_out, values.transpose(1, 2))
            if grad_sinks is not None and weights.of_sinks is not None:
                # A sink's value is zero, and so is dp of its probability.
                means = (probabilities * grad_probabilities).sum(-1, keepdim=True, dtype=wide)
                grad_sinks -= (weights.of_sinks * means).view(kv_heads, groups, -1).sum(-1)
            # p * (dp - sum(p * dp)), fused. With sinks too, where all p of a row are less than one.
            grad_scores = torch.ops.aten._softmax_backward_data(
                grad_probabilities, probabilities, -1, probabilities.dtype
            )
            if weights.slope is not None:
                grad_scores.mul_(weights.slope)
            grad_q[block.real] = _by_token(torch.bmm(grad_scores, keys), block)
            queries = by_head(block.queries(grouped))
            block.add_to(grad_k, torch.bmm(grad_scores.transpose(1, 2), queries))
        # scores = scale q.k: the scale is taken out of both sums and multiplied once.
        grad_k.mul_(settings.scale)
        of_keys = grad_k.transpose(0, 1).to(k.dtype), grad_v.transpose(0, 1).to(v.dtype)
        of_sinks = None if grad_sinks is None or sinks is None else grad_sinks.flatten().to(sinks.dtype)
        return grad_q.mul_(settings.scale), *of_keys, None, of_sinks, None


@dataclass(frozen=True)
class _Weights:
    """The attention probabilities of a block's queries, and the other tensors that the backward pass needs."""

    probabilities: Tensor  # [K, G*B, L] in the type of q
    slope: Tensor | None  # [K, G*B, L] likewise: the softcap's derivative, 1 - tanh^2
    of_sinks: Tensor | None  # [K, G*B, 1] float32: the sink's own probability

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.slope, self.of_sinks, self.probabilities) if x is not None]

    @classmethod
    def taken_from(cls, tensors: Iterator[Tensor], has_softcap: bool, has_sinks: bool) -> _Weights:
        """Takes the next weights from the `tensors` of all blocks, laid one after the other."""
        slope = next(tensors) if has_softcap else None
        of_sinks = next(tensors) if has_sinks else None
        return cls(next(tensors), slope, of_sinks)


def _weights_of(
    block: QueryBlock, settings: BlockSettings, grouped: Tensor, k: Tensor, sinks: Tensor | None
) -> _Weights:
    """grouped [queries, K, G, C] queries by the head they look at, k [T, K, C], sinks [H]."""
    kv_heads, groups = grouped.shape[1:3]
    queries = by_head(block.queries(grouped))  # [K, G*B, C]
    scores = attention_scores(queries, block.keys(k).transpose(0, 1), settings.scale)  # [K, G*B, L]
    slope = of_sinks = None
    if settings.softcap is not None:
        scores.div_(settings.softcap).tanh_()
        # d/ds of cap * tanh(s / cap) is 1 - tanh^2: all that the backward pass needs of the cap.
        slope = scores.square().neg_().add_(1).to(grouped.dtype)
        scores.mul_(settings.softcap)
    block.hide(scores.view(kv_heads, groups, block.rows, -1))
    probabilities = torch.softmax(scores, dim=-1)
    if sinks is not None:
        lse = scores.logsumexp(-1, keepdim=True)  # [K, G*B, 1]
        logits = sink_logits(sinks, kv_heads, block.rows, lse.dtype)
        probabilities.mul_(torch.sigmoid(lse - logits))
        of_sinks = torch.sigmoid(logits - lse)
    return _Weights(probabilities.to(grouped.dtype), slope, of_sinks)


def sink_logits(sinks: Tensor, kv_heads: int, rows: int, dtype: torch.dtype) -> Tensor:
    """sinks [H] as [K, G*B, 1]: of each row of scores, rows = B tokens of each head."""
    return sinks.to(dtype).view(kv_heads, -1, 1).expand(-1, -1, rows).reshape(kv_heads, -1, 1)


def attention_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """queries [K, R, C] times keys [K, L, C] and scale -> [K, R, L], float32 or wider."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    if queries.dtype == wide or queries.device.type == "cpu":  # which has no product of narrow types with wide results
        return torch.bmm(queries.to(wide) * scale, keys.to(wide).transpose(1, 2))
    return torch.bmm(queries, keys.transpose(1, 2), out_dtype=wide).mul_(scale)


def by_head(x: Tensor) -> Tensor:
    """[B, K, G, C] -> [K, G*B, C]: the queries that share a key/value head become rows of one product."""
    rows, kv_heads, groups, width = x.shape
    return x.permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, width)


def _by_token(x: Tensor, block: QueryBlock) -> Tensor:
    """[K, G*B, C] -> [rows, H, C], the way back, without the rows that only fill the block."""
    kv_heads, _, width = x.shape
    real = x.view(kv_heads, -1, block.rows, width)[:, :, : block.real.stop - block.real.start]
    return real.permute(2, 0, 1, 3).flatten(1, 2)


def _hide(scores: Tensor, window: int | None) -> None:
    """Sets the scores [.., B, L] of keys that queries do not see to -inf; the last query stands at the last key.

    Only the last B keys can come after a query, and only the first L - window, of which there are fewer than B, can lie
    before its window.
    """
    rows, keys = scores.shape[-2:]
    scores[..., -rows:] += _triangle(rows, True, scores.dtype, scores.device)
    if window is not None and keys > window:
        passed = keys - window
        scores[..., :passed] += _triangle(rows, False, scores.dtype, scores.device)[:, -passed:]


# A block has one of BLOCK_ROWS / ROW_MULTIPLE sizes, so this is at most 0.25 MiB for a type and a device.
@lru_cache(maxsize=64)
def _triangle(rows: int, above: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B, B]: -inf above the diagonal, or on it and below; else 0."""
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=device)
    hidden = hidden.triu_(1) if above else hidden.tril_()
    return torch.zeros(rows, rows, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
