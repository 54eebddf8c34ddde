"""Loss scaling where part of the gradient is made in the forward pass.

fp16 needs gradients that are multiplied by a scale before they are rounded. The scale enters at the total, so it
reaches all inputs of the total, an objective's own parameters too. A fused operation, which makes its gradient in the
forward pass, gets the scale beforehand and has it in its gradient already: the gradient that reaches it in the backward
pass is divided by the scale again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Returns `x` itself; its gradient is multiplied by `scale` in the backward pass. No operation where the scale is
    1.
    """
    scaled: Tensor = x if scale == 1 else _ScaledGradient.apply(x, scale, False)
    return scaled


def unscale_gradient(x: Tensor, scale: float) -> Tensor:
    """Returns `x` itself; its gradient is divided by `scale` in the backward pass. No operation where the scale is 1.

    A division, for then a gradient of exactly `scale` becomes exactly 1, which it would not for every scale if it were
    multiplied by the rounded inverse.
    """
    unscaled: Tensor = x if scale == 1 else _ScaledGradient.apply(x, scale, True)
    return unscaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, divide: bool) -> Tensor:
        ctx.scale, ctx.divide = scale, divide
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient / ctx.scale if ctx.divide else gradient * ctx.scale, None, None
