"""Speculative sampling: a token from one distribution becomes a token of another, changed as seldom as can be."""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.inference.blocked_softmax import BlockSums


def rejection_sample(p: Tensor, q: Tensor, proposed: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
    """Tokens [B] int64 that follow p, given proposals that follow q (arXiv:2211.17192, algorithm 1).

    A proposal x is kept with probability min(1, p(x) / q(x)); in place of the others there is a draw from
    max(0, p - q), normalised. No rule keeps more of them. A token that is drawn in place of a proposal differs from it.

    Args:
        p, q: [B, V] float32, rows of probabilities.
        proposed: [B] int64, drawn from q.
        accept, residual: [B, 1] float64 in [0, 1), random numbers that do not depend on those behind `proposed`.
    """
    at_proposed = proposed.unsqueeze(1)
    is_kept = accept * q.gather(1, at_proposed) < p.gather(1, at_proposed)  # [B, 1]
    others = BlockSums.of((p - q).clamp_(min=0))
    # Where p and q differ by rounding alone there may be no rest, and what the rounding says of the proposal is chance.
    is_kept |= others.total == 0
    return torch.where(is_kept.squeeze(1), proposed, others.draw(residual))
