"""Attention over a pack as one would write it down."""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.models.attend import visible


class ReferenceAttention:
    """What PackedAttention computes, by one dense mask over the whole pack: slow and obvious."""

    def __init__(self, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        total = q.shape[0]
        document = torch.bucketize(torch.arange(total), torch.tensor(self.boundaries[1:]), right=True).to(q.device)
        mask = visible(total, total, window, q.device) & (document[:, None] == document[None, :])
        return masked_attention(q, k, v, mask, scale=scale, softcap=softcap)


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
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhc,shc->hqs", q.to(wide), k.to(wide)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    probabilities = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(v.dtype)
    return torch.einsum("hqs,shc->qhc", probabilities, v)
