"""Attention over packed documents, and the slow obvious version that tests compare with.

T packed tokens · H query heads · K key/value heads · G = H / K queries a key/value head serves · C head width
S tokens of one document · B rows of a query block · L keys such a block sees
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

varlen_attn: Any = None
with suppress(ImportError):  # flash attention over packed documents, in torch itself since 2.10
    from torch.nn.attention.varlen import varlen_attn

# On CPU, documents up to this length are done by `_BlockAttention`: the backward pass of torch's flash kernel is slow for
# short rows (161 tokens, 8 heads of 32, bf16, two threads: 2.8 ms against 1.1 ms; equal near 800 tokens).
SHORT_DOCUMENT = 768
BLOCK_ROWS = 256


class PackedAttention:
    """Causal attention inside each document of a pack; satisfies `danlu.types.Attend`.

    Documents are attended one by one (on CUDA by one variable-length kernel), so the cost is the sum of squared lengths
    and no mask over the pack is built. A dense block mask measured 3-6 times slower on CPU.

    boundaries: offsets of the documents in the pack, from 0 to T.
    """

    def __init__(self, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries
        self._offsets: Tensor | None = None  # int32 copy on the device, for the variable-length kernel

    @torch.compiler.disable  # document lengths change with every pack: compiled code around it must not depend on them
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
        if varlen_attn is not None and q.is_cuda and q.dtype != torch.float32 and window is None and softcap is None:
            return self._variable_length(q, k, v, scale)
        starts, ends = self.boundaries[:-1], self.boundaries[1:]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        pieces = [
            document_attention(one_q, one_k, one_v, scale=scale, window=window, softcap=softcap)
            for one_q, one_k, one_v in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _variable_length(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self._offsets is None or self._offsets.device != q.device:
            self._offsets = torch.tensor(self.boundaries, dtype=torch.int32, device=q.device)
        longest = max(end - start for start, end in zip(self.boundaries[:-1], self.boundaries[1:], strict=True))
        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # the kernel takes grouped heads only from torch 2.13 on
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out: Tensor = varlen_attn(
            q, k, v, self._offsets, self._offsets, longest, longest, scale=scale, **_causal_argument()
        )
        return out


@lru_cache(maxsize=1)
def _causal_argument() -> dict[str, Any]:
    """How this torch's variable-length kernel is told to be causal: `is_causal` became `window_size` in 2.11."""
    names = inspect.signature(varlen_attn).parameters
    return {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}


def document_attention(
    q: Tensor,  # [S, H, C]
    k: Tensor,  # [S, K, C]
    v: Tensor,  # [S, K, C]
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:  # [S, H, C]
    """Causal attention of one document, by whichever of two exact methods is faster or can say what is asked."""
    length = q.shape[0]
    window = None if window is None or window >= length else window
    short = q.device.type == "cpu" and length <= SHORT_DOCUMENT
    if short or window is not None or softcap is not None:
        out: Tensor = _BlockAttention.apply(q, k, v, _Settings(scale, window, softcap))
        return out
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, S, C]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


@dataclass(frozen=True)
class _Settings:
    scale: float
    window: int | None
    softcap: float | None

    def blocks(self, length: int) -> Iterator[tuple[int, int, int]]:
        """(first query, end of queries = end of keys, first key) of each block of query rows."""
        for start in range(0, length, BLOCK_ROWS):
            first_key = 0 if self.window is None else max(0, start - self.window + 1)
            yield start, min(start + BLOCK_ROWS, length), first_key


class _BlockAttention(torch.autograd.Function):
    """Attention as matrix products over blocks of query rows, each against only the keys it can see.

    Probabilities are kept for the backward pass, in the dtype of q: two bytes a score in bfloat16, the same that one
    written-out attention would keep, less the blocks above the diagonal or outside the window.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> Tensor:
        length, heads, width = q.shape
        kv_heads = k.shape[1]
        groups = heads // kv_heads
        keys, values = k.transpose(0, 1), v.transpose(0, 1)  # [K, S, C]
        grouped = (q * settings.scale).view(length, kv_heads, groups, width)
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        for start, end, first in settings.blocks(length):
            rows = end - start
            queries = _by_head(grouped[start:end])  # [K, G*B, C]
            scores = torch.bmm(queries, keys[:, first:end].transpose(1, 2))  # [K, G*B, L]
            if settings.softcap is not None:
                scores.div_(settings.softcap).tanh_()
                kept.append(1 - scores.square())
                scores.mul_(settings.softcap)
            mask = _hidden_scores(rows, end - first, settings.window, scores.dtype, scores.device)
            scores.view(kv_heads, groups, rows, -1)[..., -mask.shape[1] :].add_(mask)
            probabilities = torch.softmax(scores, dim=-1)
            kept.append(probabilities)
            out[start:end] = _by_token(torch.bmm(probabilities, values[:, first:end]), rows)
        ctx.settings = settings
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, *saved = ctx.saved_tensors
        settings: _Settings = ctx.settings
        length, heads, width = q.shape
        kv_heads = k.shape[1]
        groups = heads // kv_heads
        keys, values = k.transpose(0, 1), v.transpose(0, 1)  # [K, S, C]
        grouped = q.reshape(length, kv_heads, groups, width)
        grad_grouped = grad.reshape(length, kv_heads, groups, width)
        wide = torch.promote_types(q.dtype, torch.float32)  # blocks are summed in float32
        grad_q = torch.empty_like(q)
        grad_k, grad_v = keys.new_zeros(keys.shape, dtype=wide), values.new_zeros(values.shape, dtype=wide)
        kept = iter(saved)
        for start, end, first in settings.blocks(length):
            slope = next(kept) if settings.softcap is not None else None
            probabilities = next(kept)  # [K, G*B, L]
            grad_out = _by_head(grad_grouped[start:end])  # [K, G*B, C]
            grad_v[:, first:end] += torch.bmm(probabilities.transpose(1, 2), grad_out)
            grad_probabilities = torch.bmm(grad_out, values[:, first:end].transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(
                grad_probabilities, probabilities, -1, probabilities.dtype
            )
            if slope is not None:
                grad_scores.mul_(slope)
            grad_q[start:end] = _by_token(torch.bmm(grad_scores, keys[:, first:end]), end - start)
            grad_k[:, first:end] += torch.bmm(grad_scores.transpose(1, 2), _by_head(grouped[start:end]))
        grad_k.mul_(settings.scale)
        return grad_q.mul_(settings.scale), grad_k.transpose(0, 1).to(k.dtype), grad_v.transpose(0, 1).to(v.dtype), None


def _by_head(x: Tensor) -> Tensor:
    """[B, K, G, C] -> [K, G*B, C]: the queries that share a key/value head become rows of one product."""
    rows, kv_heads, groups, width = x.shape
    return x.permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, width)


def _by_token(x: Tensor, rows: int) -> Tensor:
    """[K, G*B, C] -> [B, H, C], the way back."""
    kv_heads, _, width = x.shape
    return x.view(kv_heads, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, -1, width)


@lru_cache(maxsize=256)
def _hidden_scores(rows: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to a block's scores, -inf where hidden: [B, B] at the diagonal, or [B, L] with a window."""
    columns = rows if window is None else keys
    return torch.zeros(rows, columns, dtype=dtype, device=device).masked_fill_(
        ~visible(rows, columns, window, device), float("-inf")
    )


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: True where a query sees a key, when the last query stands at the last key.

    A query sees itself and everything before it, or with a window itself and `window - 1` tokens before it.
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries + 1 - window)


def masked_attention(
    q: Tensor,  # [Q, H, C]
    k: Tensor,  # [S, K, C]
    v: Tensor,  # [S, K, C]
    mask: Tensor,  # [Q, S] bool, True = sees
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:  # [Q, H, C]
    """Attention written out, with scores in float32 or wider."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [S, H, C]
    scores = torch.einsum("qhc,shc->hqs", q, k).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    probabilities = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(v.dtype)
    return torch.einsum("hqs,shc->qhc", probabilities, v)


class ReferenceAttention:
    """The same as PackedAttention by one dense mask over the whole pack: slow and obvious, for tests."""

    def __init__(self, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        total = q.shape[0]
        document = torch.bucketize(torch.arange(total), torch.tensor(self.boundaries[1:]), right=True).to(q.device)
        mask = visible(total, total, window, q.device) & (document[:, None] == document[None, :])
        return masked_attention(q, k, v, mask, scale=scale, softcap=softcap)
