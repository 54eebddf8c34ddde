"""Attention over packed documents: each document by itself, by the kernels that suit it.

T packed tokens · H query heads · K key/value heads · G = H / K queries a key/value head serves · C head width
S tokens of one document · B rows of a query block, filled up · L keys such a block sees
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.models.attention_kernels import Kernels, copy_to, documents_mask, kernels_of
from danlu.types import Batch, Branch

BLOCK_ROWS = 256
# Blocks of query rows are filled up to a multiple of this: see `attention_kernels.DOCUMENT_MULTIPLE`.
ROW_MULTIPLE = 32


class PackedAttention:
    """Causal attention inside each document of a pack; satisfies `danlu.types.Attend`.

    Documents are attended one by one (where the device has one, by a kernel that takes all of them), so the cost is the
    sum of squared lengths and no mask over the pack is built. A dense block mask measured 3-6 times slower on CPU.

    boundaries: offsets of the documents in the pack, from 0 to T. trees: the branches of the documents, where a branch
    sees itself and its ancestors and nothing beside it; empty where each document is one branch. kernels: what may be
    used; by default whatever the device has.
    """

    def __init__(
        self, boundaries: tuple[int, ...], trees: tuple[Branch, ...] = (), kernels: Kernels | None = None
    ) -> None:
        self.boundaries = boundaries
        self.trees = trees
        self._kernels = kernels
        self._offsets: Tensor | None = None  # int32 copy on the device, for the variable-length kernel
        self._masks: dict[int | None, Any] = {}  # by window, for flex attention

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        k: Tensor,  # [T, K, C]
        v: Tensor,  # [T, K, C]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [T, H, C]
        if any(branch.parent >= 0 for branch in self.trees):
            return _attend_trees(self.trees, q, k, v, scale=scale, window=window, softcap=softcap)
        kernels = self._kernels or kernels_of(q.device)
        if kernels.varlen is not None and kernels.varlen.takes(q, window, softcap):
            longest = max(end - start for start, end in itertools.pairwise(self.boundaries))
            return kernels.varlen(q, k, v, self._offsets_on(q.device), longest, scale=scale, window=window)
        if softcap is not None and kernels.flex is not None and kernels.flex.takes(q, softcap):
            return kernels.flex(q, k, v, self._mask_on(q.device, window), scale=scale, softcap=softcap)
        blocks = _takes_blocks(kernels, window, softcap)
        runs = _runs(self.boundaries, blocks)
        lengths = [run[-1] - run[0] for run in runs]
        outputs: list[Tensor] = []
        for run, own_q, own_k, own_v in zip(runs, q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            if blocks(run[-1] - run[-2]):
                settings = _Settings(tuple(place - run[0] for place in run), scale, window, softcap)
                outputs.append(_BlockAttention.apply(own_q, own_k, own_v, settings))
            else:
                outputs.append(_whole_document(own_q, own_k, own_v, scale, kernels))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _offsets_on(self, device: torch.device) -> Tensor:
        if self._offsets is None or self._offsets.device != device:
            self._offsets = copy_to(torch.tensor(self.boundaries, dtype=torch.int32), device)
        return self._offsets

    def _mask_on(self, device: torch.device, window: int | None) -> Any:
        if window not in self._masks:
            self._masks[window] = documents_mask(self.boundaries, window, device)
        return self._masks[window]


def attend_for(batch: Batch) -> PackedAttention:
    """The attention that models are given for a packed batch, in training, evaluation and measuring alike."""
    return PackedAttention(batch.boundaries, batch.trees)


def _attend_trees(
    trees: tuple[Branch, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of each branch over the keys of its ancestors and its own: [T, H, C]."""
    groups = q.shape[1] // k.shape[1]
    outputs: list[Tensor] = []
    for branch in trees:
        path = [branch]
        while path[0].parent >= 0:
            path.insert(0, trees[path[0].parent])
        keys, values = (torch.cat([x[part.start : part.stop] for part in path]).transpose(0, 1) for x in (k, v))
        keys, values = (x.repeat_interleave(groups, dim=0) for x in (keys, values))  # [H, L, C]
        queries = q[branch.start : branch.stop].transpose(0, 1)  # [H, S, C]
        scores = attention_scores(queries, keys, scale)  # [H, S, L]
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        seen = visible(queries.shape[1], keys.shape[1], window, q.device)
        probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype)
        outputs.append((probabilities @ values).transpose(0, 1))
    return torch.cat(outputs)


def _whole_document(q: Tensor, k: Tensor, v: Tensor, scale: float, kernels: Kernels) -> Tensor:
    """Attention of one document [S, heads, C] by `scaled_dot_product_attention`."""
    length = q.shape[0]
    if more := -length % kernels.document_multiple:  # what comes after every real query, which does not see it
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, S, C]
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.dtype not in kernels.grouped_heads:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups > 1)
    return out.squeeze(0).transpose(0, 1)[:length]


def _takes_blocks(kernels: Kernels, window: int | None, softcap: float | None) -> Callable[[int], bool]:
    """Whether documents of a length are done by `_BlockAttention`: torch's kernels know no windows and no softcaps."""
    short = kernels.short_document
    return lambda length: length <= short or softcap is not None or (window is not None and window < length)


def _runs(boundaries: tuple[int, ...], joined: Callable[[int], bool]) -> list[tuple[int, ...]]:
    """Boundaries of runs of documents: as many in a row as are `joined`, every other one by itself."""
    runs: list[tuple[int, ...]] = []
    open_run = False
    for start, end in itertools.pairwise(boundaries):
        joins = joined(end - start)
        if joins and open_run:
            runs[-1] += (end,)
        else:
            runs.append((start, end))
        open_run = joins
    return runs


@dataclass(frozen=True)
class _Settings:
    boundaries: tuple[int, ...]
    scale: float
    window: int | None
    softcap: float | None

    def blocks(self) -> Iterator[_Block]:
        for begin, end in itertools.pairwise(self.boundaries):
            window = None if self.window is None or self.window >= end - begin else self.window
            for start in range(begin, end, BLOCK_ROWS):
                first = begin if window is None else max(begin, start - window + 1)
                rows = min(BLOCK_ROWS, end - start)
                yield _Block(start, start + rows, first, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, window)


@dataclass(frozen=True)
class _Block:
    """Query rows of one document, `start` to `stop`, which see keys from `first` on; filled up to B = `rows`."""

    start: int
    stop: int
    first: int
    rows: int
    window: int | None

    def queries(self, x: Tensor) -> Tensor:
        """[B, ...]: rows of x [T, ...], then zeros."""
        return self._filled(x, self.start)

    def keys(self, x: Tensor) -> Tensor:
        """[L, ...]: rows of x [T, ...], then zeros: what stands there belongs to another document, and may be NaN."""
        return self._filled(x, self.first)

    def _filled(self, x: Tensor, start: int) -> Tensor:
        size = self.start + self.rows - start
        if size == self.stop - start:
            return x[start : self.stop]
        filled = x.new_zeros(size, *x.shape[1:])
        filled[: self.stop - start] = x[start : self.stop]
        return filled


class _BlockAttention(torch.autograd.Function):
    """Attention as matrix products over blocks of query rows, each against only the keys it can see.

    Rows that fill a block up see everything and are thrown away; as keys they are hidden from every real row, since
    they come after it. Scores, softcap and softmax are in float32: where scores are large, bfloat16 goes in steps of an
    eighth. Probabilities are kept for the backward pass, in the dtype of q: two bytes a score in bfloat16, the same
    that one written-out attention would keep, less the blocks above the diagonal or outside the window.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> Tensor:
        kv_heads = k.shape[1]
        groups = q.shape[1] // kv_heads
        grouped = q.unflatten(1, (kv_heads, groups))  # [T, K, G, C]
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        for block in settings.blocks():
            queries = _by_head(block.queries(grouped))  # [K, G*B, C]
            keys, values = (block.keys(x).transpose(0, 1) for x in (k, v))  # [K, L, C]
            scores = attention_scores(queries, keys, settings.scale)  # [K, G*B, L]
            if settings.softcap is not None:
                scores.div_(settings.softcap).tanh_()
                # d/ds of cap * tanh(s / cap) is 1 - tanh^2: all that the backward pass needs of the cap.
                kept.append(scores.square().neg_().add_(1).to(q.dtype))
                scores.mul_(settings.softcap)
            _hide(scores.view(kv_heads, groups, block.rows, -1), block.window)
            probabilities = torch.softmax(scores, dim=-1).to(q.dtype)
            kept.append(probabilities)
            out[block.start : block.stop] = _by_token(torch.bmm(probabilities, values), block)
        ctx.settings = settings
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, *saved = ctx.saved_tensors
        settings: _Settings = ctx.settings
        kv_heads = k.shape[1]
        groups = q.shape[1] // kv_heads
        grouped, grad_grouped = (x.unflatten(1, (kv_heads, groups)) for x in (q, grad))  # [T, K, G, C]
        wide = torch.promote_types(q.dtype, torch.float32)  # blocks are summed in float32
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (x.new_zeros(kv_heads, *x.shape[::2], dtype=wide) for x in (k, v))  # [K, T, C]
        kept = iter(saved)
        for block in settings.blocks():
            slope = next(kept) if settings.softcap is not None else None
            probabilities = next(kept)  # [K, G*B, L]
            keys, values = (block.keys(x).transpose(0, 1) for x in (k, v))  # [K, L, C]
            real = slice(block.first, block.stop)
            count = block.stop - block.first
            grad_out = _by_head(block.queries(grad_grouped))  # [K, G*B, C]
            # Blocks share keys, so grad_k and grad_v are sums over blocks; the rows that fill a block up are cut off.
            grad_v[:, real] += torch.bmm(probabilities.transpose(1, 2), grad_out)[:, :count]
            grad_probabilities = torch.bmm(grad_out, values.transpose(1, 2))
            # p * (dp - sum(p * dp)), fused.
            grad_scores = torch.ops.aten._softmax_backward_data(
                grad_probabilities, probabilities, -1, probabilities.dtype
            )
            if slope is not None:
                grad_scores.mul_(slope)
            grad_q[block.start : block.stop] = _by_token(torch.bmm(grad_scores, keys), block)
            queries = _by_head(block.queries(grouped))
            grad_k[:, real] += torch.bmm(grad_scores.transpose(1, 2), queries)[:, :count]
        # scores = scale q.k: the scale is taken out of both sums and multiplied once.
        grad_k.mul_(settings.scale)
        return grad_q.mul_(settings.scale), grad_k.transpose(0, 1).to(k.dtype), grad_v.transpose(0, 1).to(v.dtype), None


def attention_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """queries [K, R, C] times keys [K, L, C] and scale -> [K, R, L], float32 or wider."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    if queries.dtype == wide or queries.device.type == "cpu":  # which has no product of narrow types with wide results
        return torch.bmm(queries.to(wide) * scale, keys.to(wide).transpose(1, 2))
    return torch.bmm(queries, keys.transpose(1, 2), out_dtype=wide).mul_(scale)


def _by_head(x: Tensor) -> Tensor:
    """[B, K, G, C] -> [K, G*B, C]: the queries that share a key/value head become rows of one product."""
    rows, kv_heads, groups, width = x.shape
    return x.permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, width)


def _by_token(x: Tensor, block: _Block) -> Tensor:
    """[K, G*B, C] -> [rows, H, C], the way back, without the rows that only fill the block."""
    kv_heads, _, width = x.shape
    real = x.view(kv_heads, -1, block.rows, width)[:, :, : block.stop - block.start]
    return real.permute(2, 0, 1, 3).flatten(1, 2)


def _hide(scores: Tensor, window: int | None) -> None:
    """Makes the scores [.., B, L] of what queries do not see -inf; the last query stands at the last key.

    Only the last B keys can come after a query, and only the first L - window, of which there are fewer than B, can lie
    before its window.
    """
    rows, keys = scores.shape[-2:]
    scores[..., -rows:] += _triangle(rows, True, scores.dtype, scores.device)
    if window is not None and keys > window:
        passed = keys - window
        scores[..., :passed] += _triangle(rows, False, scores.dtype, scores.device)[:, -passed:]


# A block has one of BLOCK_ROWS / ROW_MULTIPLE sizes, so this is at most 3.2 MiB for a type and a device.
@lru_cache(maxsize=64)
def _triangle(rows: int, above: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B, B]: -inf above the diagonal, or on it and below; else 0."""
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=device)
    hidden = hidden.triu_(1) if above else hidden.tril_()
    return torch.zeros(rows, rows, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: True where a query sees a key, when the last query stands at the last key.

    A query sees itself and everything before it, or with a window itself and `window - 1` tokens before it.
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries + 1 - window)
