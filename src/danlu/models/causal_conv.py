"""A short causal convolution of each channel over packed tokens, followed by silu, as layers with a state have it.

T packed tokens · F channels · W width of the kernel: a token sees itself and the W - 1 before it in its document
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.models.recurrent_order import RecurrentOrder, Windows


def causal_conv(x: Tensor, weight: Tensor, order: RecurrentOrder, before: Tensor | None = None) -> Tensor:
    """Computes silu of the convolution; a document is preceded by zeros. Differentiable in x and weight.

    Args:   x [T, F]; weight [F, 1, W] float32 or wider, or of x's type: sums are made in the wider one;
            before [runs, W - 1, F]: the inputs that precede each run, where runs continue others; it gets no gradient.
    Returns [T, F] in x's type.
    """
    windows = order.windows(weight.shape[-1] - 1, x.device)
    if torch.is_grad_enabled():
        assert before is None, "a state that is given has no gradient"
        y: Tensor = _CausalConv.apply(x, weight, windows)
        return y
    rows = _rows(x, windows, before, _sum_dtype(x, weight))
    return F.silu(_convolved(rows, weight)).index_select(0, windows.places - _before(weight)).to(x.dtype)


def causal_conv_step(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """`causal_conv` of one token of each of T sequences; before [T, W - 1, F]."""
    wide = _sum_dtype(x, weight)
    taps = weight.to(wide).squeeze(1).t()  # [W, F]
    y = (before.to(wide) * taps[:-1]).sum(1) + x.to(wide) * taps[-1]
    return F.silu(y).to(x.dtype)


def last_inputs(x: Tensor, order: RecurrentOrder, before: Tensor) -> Tensor:
    """Returns the last inputs of each run, [runs, W - 1, F], for its continuation; arguments as in `causal_conv`."""
    width = before.shape[1]
    ends = torch.tensor([run.stop for run in order.runs], device=x.device)
    windows = order.windows(width, x.device)
    rows = _rows(x, windows, before, x.dtype)
    last = windows.places[ends - 1].unsqueeze(1) + torch.arange(1 - width, 1, device=x.device)
    return rows[last]


def _before(weight: Tensor) -> int:
    return weight.shape[-1] - 1


def _sum_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Float32, or the wider one of both: sums that are rounded to bfloat16 at each step lose digits."""
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _rows(x: Tensor, windows: Windows, before: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the tokens, each run with the inputs that precede it in front, [T + runs * (W - 1), F]."""
    rows = x.new_zeros(windows.count, x.shape[1], dtype=dtype)
    rows.index_copy_(0, windows.places, x.to(dtype))
    if windows.shared is not None:
        target, tokens = windows.shared
        rows.index_copy_(0, target, x.index_select(0, tokens).to(dtype))
    if before is not None:
        target, of_runs = windows.earlier
        rows.index_copy_(0, target, before.flatten(0, 1).index_select(0, of_runs).to(dtype))
    return rows


def _convolved(rows: Tensor, weight: Tensor) -> Tensor:
    """[rows - (W - 1), F]: of each row from the W-th on, the sum over it and those before it."""
    taps = weight.to(rows.dtype).squeeze(1).t().contiguous()  # [W, F]
    count = len(rows) - _before(weight)
    y = rows[:count] * taps[0]
    for place in range(1, len(taps)):
        y.addcmul_(rows[place : place + count], taps[place])
    return y


class _CausalConv(torch.autograd.Function):
    """Saves x alone; the sums are made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, windows: Windows) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.windows = windows
        y = F.silu(_convolved(_rows(x, windows, None, _sum_dtype(x, weight)), weight))
        return y.index_select(0, windows.places - _before(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        windows: Windows = ctx.windows
        rows = _rows(x, windows, None, _sum_dtype(x, weight))
        y = _convolved(rows, weight)
        grad_y = torch.zeros_like(y)
        grad_y.index_copy_(0, windows.places - _before(weight), grad.to(y.dtype))
        grad_y = torch.ops.aten.silu_backward(grad_y, y)
        taps = weight.to(y.dtype).squeeze(1).t().contiguous()
        grad_rows, grad_taps = torch.zeros_like(rows), torch.empty_like(taps)
        for place, tap in enumerate(taps):
            seen = slice(place, place + len(y))
            grad_rows[seen].addcmul_(grad_y, tap)
            grad_taps[place] = (grad_y * rows[seen]).sum(0)
        grad_x = grad_rows.index_select(0, windows.places)
        if windows.shared is not None:
            of_rows, tokens = windows.shared
            grad_x.index_add_(0, tokens, grad_rows.index_select(0, of_rows))
        return grad_x.to(x.dtype), grad_taps.t().unsqueeze(1).to(weight.dtype), None
