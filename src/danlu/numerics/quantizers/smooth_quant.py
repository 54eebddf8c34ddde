"""SmoothQuant (arXiv:2211.10438): factors that move outliers from a layer's inputs into its weights."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-5


def smoothing_factors(largest_input: Tensor, largest_weight: Tensor, alpha: float = 0.5) -> Tensor:
    """Returns s = max|x|^alpha / max|w|^(1 - alpha) by input (eq. 4), [I] float32: x / s and w s are the new ones.

    largest_input [I]: the greatest |x|; largest_weight [I]: the greatest |w| of all layers that read x. An input that
    is always zero, or that no weight reads, keeps its factor of 1.
    """
    x, w = largest_input.float().clamp_min(_LEAST), largest_weight.float().clamp_min(_LEAST)
    factors = x.pow(alpha) / w.pow(1 - alpha)
    return factors.clamp_min(_LEAST).where((largest_input > 0) & (largest_weight > 0), torch.ones_like(factors))
