"""Attention over a pack as one would write it down."""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.models.attend import masked_attention, visible


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
