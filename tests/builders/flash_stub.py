"""Stand-ins on the CPU for the FlashAttention of a GPU: what its two operators compute, written out tile by tile."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from danlu.models.attention_kernels import EVERY, Kernels, VarlenTiles


class FlashStub:
    """`aten._flash_attention_forward` and `_flash_attention_backward` with the arguments they have, and how often each
    was called. A mask lines up the last query and the last key of each tile."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.tiles = 0
        """Of all forward calls."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        """out [T, H, C], logsumexp [H, T], and what is not read."""
        self.calls["forward"] += 1
        assert dropout_p == 0 and not return_debug_mask
        window = window_size_left, window_size_right
        tiles = self._tiles(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window)
        window = _as_the_kernel_reads(window, max_k)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        for rows, columns in tiles:
            self.tiles += 1
            scores = _scores(query[rows], key[columns], scale, window)
            lse[:, rows] = scores.logsumexp(-1)
            values = value[columns].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            out[rows] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), values)
        return out, lse, None, None, None

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: Tensor, unused: Tensor, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients by the formulas of arXiv:2205.14135, with the out [T, H, C] and logsumexp [H, T] that are given."""
        self.calls["backward"] += 1
        assert dropout_p == 0 and rng_state.dtype == torch.uint64 and len(rng_state) == 2 and unused.numel() == 0
        assert logsumexp.is_contiguous() and logsumexp.shape == (query.shape[1], len(query))
        window = window_size_left, window_size_right
        groups = query.shape[1] // key.shape[1]
        of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
        tiles = self._tiles(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window)
        window = _as_the_kernel_reads(window, max_k)
        for rows, columns in tiles:
            scores = _scores(query[rows], key[columns], scale, window)
            probabilities = torch.exp(scores - logsumexp[:, rows].unsqueeze(-1))
            keys, values = (x[columns].repeat_interleave(groups, dim=1) for x in (key, value))
            mean = (grad_out[rows] * out[rows]).sum(-1).T.unsqueeze(-1)  # [H, B, 1]
            of_scores = probabilities * (torch.einsum("qhc,khc->hqk", grad_out[rows], values) - mean) * scale
            of_query[rows] = torch.einsum("hqk,khc->qhc", of_scores, keys)
            of_key[columns] = _summed(torch.einsum("hqk,qhc->khc", of_scores, query[rows]), groups)
            of_value[columns] = _summed(torch.einsum("hqk,qhc->khc", probabilities, grad_out[rows]), groups)
        return of_query, of_key, of_value

    def _tiles(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        is_causal: bool, window: tuple[int, int],
    ) -> list[tuple[slice, slice]]:  # fmt: skip
        """Query and key rows of each tile; the operators refuse what does not hold here."""
        assert is_causal == (window == (-1, 0)) and min(window) >= -1
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] and len(key) == len(value)
        assert query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1]
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        ends = []
        for offsets, longest, tensor in ((cum_seq_q, max_q, query), (cum_seq_k, max_k, key)):
            assert offsets.dtype == torch.int32 and int(offsets[0]) == 0 and int(offsets[-1]) == len(tensor)
            assert longest == int(offsets.diff().max()) and int(offsets.diff().min()) > 0
            ends.append([slice(*pair) for pair in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)])
        return list(zip(*ends, strict=True))


def _as_the_kernel_reads(window: tuple[int, int], max_k: int) -> tuple[int, int]:
    """FlashAttention's own bounds: one that reaches over the longest tile is none, and beside another one no bound is
    as many keys as the longest tile has, which hides some where a tile has more queries than that."""
    left, right = (-1 if bound >= max_k else bound for bound in window)
    if left < 0 <= right:
        left = max_k
    elif right < 0 <= left:
        right = max_k
    return left, right


def stub_kernels() -> tuple[FlashStub, Kernels]:
    """A stub, and kernels that have it for tiles, in all types."""
    stub = FlashStub()
    return stub, Kernels(tiles=VarlenTiles(stub.forward, stub.backward, EVERY))


def _scores(q: Tensor, k: Tensor, scale: float, window: tuple[int, int]) -> Tensor:
    """[H, B, L], -inf where hidden."""
    scores = torch.einsum("qhc,khc->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
    ahead = torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q)).unsqueeze(1)
    left, right = (math.inf if bound < 0 else bound for bound in window)
    visible = (ahead <= right) & (ahead >= -left)
    assert visible.any(1).all(), "kernels do not agree on what a row is that sees nothing"
    return scores.masked_fill(~visible, float("-inf"))


def _summed(x: Tensor, groups: int) -> Tensor:
    """[L, H, C] -> [L, K, C]"""
    return x.unflatten(1, (-1, groups)).sum(2)
