"""Statistics of rows of logits, and their gradient, each in one pass over them: Triton kernels for a GPU.

In torch's operators a slice of logits is read or written about a dozen times, in float32; here it is read once in its
own type for the statistics, and read and written once for the gradient (H100, 4096 targets, V = 128256, bfloat16: see
benchmarks/RESULTS.md). Results, and their order over slices, are as in `linear_cross_entropy`.

This file is imported where Triton is installed and logits are on a GPU. With TRITON_INTERPRET=1 the kernels run on a
CPU, one number after the other, for tests.

N rows · S columns of a slice
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Columns that a program has in its registers at once."""
WARPS = 8


@dataclass(frozen=True)
class RunningStatistics:
    """Statistics of rows of logits over the slices processed so far, [N] each."""

    highest: Tensor  # float32, the largest logit
    mass: Tensor  # float32, the sum of exp(logit - highest)
    at_target: Tensor  # float32, the target's logit; 0 until its slice
    total: Tensor  # float32, the sum of logits; 0 where it is not asked for
    likeliest: Tensor  # int64, the first token that has the largest logit

    @classmethod
    def of_nothing(cls, count: int, device: torch.device) -> RunningStatistics:
        """Returns the statistics of `count` rows before the first slice."""
        mass, at_target, total = torch.zeros(3, count, device=device).unbind()
        highest = torch.full((count,), float("-inf"), device=device)
        return cls(highest, mass, at_target, total, torch.zeros(count, dtype=torch.int64, device=device))


def update_statistics(
    running: RunningStatistics, logits: Tensor, columns: Tensor, start: int, *, softcap: float | None, wants_total: bool
) -> None:
    """Adds a slice of logits [N, S]; its first column is the token `start`, and its rows are contiguous.

    columns [N] int64: the target of each row, counted from `start`; below 0 or from S on where it is in another slice.
    """
    if not len(logits):
        return
    _statistics_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        columns,
        running.highest,
        running.mass,
        running.at_target,
        running.total,
        running.likeliest,
        logits.shape[1],
        start,
        softcap or 1.0,
        has_softcap=softcap is not None,
        wants_total=wants_total,
        block=BLOCK,
        num_warps=WARPS,
    )


def gradient_in_place(
    logits: Tensor,
    columns: Tensor,
    log_z: Tensor,
    scales: Tensor,
    *,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
) -> None:
    """Puts the gradient of the loss in the place of logits [N, S], in their type; rows are contiguous.

    columns: as in `update_statistics`. log_z [N] float32: over the whole vocabulary. scales [N] float32: the weight of
    each row, times the factor of gradients.

    d loss / d y = (1 + 2 z log Z) p - (1 - s) onehot - s / V, times each row's scale
    """
    if not len(logits):
        return
    _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
        logits,
        logits.stride(0),
        columns,
        log_z,
        scales,
        logits.shape[1],
        softcap or 1.0,
        1.0 - label_smoothing,
        label_smoothing / vocab_size,
        2.0 * z_loss,
        has_softcap=softcap is not None,
        block=BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _capped(y, cap):
    """cap x tanh(y / cap), to the rounding of `cap` in float32."""
    return cap * (2.0 * tl.sigmoid(2.0 * y / cap) - 1.0)


@triton.jit
def _statistics_kernel(
    logits,
    row_stride,
    columns,
    highest,
    mass,
    at_target,
    total,
    likeliest,
    width,
    start,
    cap,
    has_softcap: tl.constexpr,
    wants_total: tl.constexpr,
    block: tl.constexpr,
):
    """One program a row, with a running maximum (arXiv:1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(columns + row)
    top, exponentials, best = tl.load(highest + row), tl.load(mass + row), tl.load(likeliest + row)
    of_target, summed = tl.load(at_target + row), tl.load(total + row)
    for first in range(0, width, block):
        offsets = first + tl.arange(0, block)
        here = offsets < width
        y = tl.load(logits + row * row_stride + offsets, mask=here, other=float("-inf")).to(tl.float32)
        if has_softcap:
            y = tl.where(here, _capped(y, cap), float("-inf"))
        if wants_total:
            summed += tl.sum(tl.where(here, y, 0.0), 0)
        of_target += tl.sum(tl.where(here & (offsets == column), y, 0.0), 0)
        largest = tl.max(y, 0)
        best = tl.where(largest > top, tl.argmax(y, 0).to(tl.int64) + first + start, best)
        raised = tl.maximum(top, largest)
        exponentials = exponentials * tl.exp(top - raised) + tl.sum(tl.exp(y - raised), 0)
        top = raised
    tl.store(highest + row, top)
    tl.store(mass + row, exponentials)
    tl.store(likeliest + row, best)
    tl.store(at_target + row, of_target)
    tl.store(total + row, summed)


@triton.jit
def _gradient_kernel(
    logits,
    row_stride,
    columns,
    log_z,
    scales,
    width,
    cap,
    on_target,
    everywhere,
    doubled_z_loss,
    has_softcap: tl.constexpr,
    block: tl.constexpr,
):
    """One program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * block + tl.arange(0, block)
    here = offsets < width
    place = logits + row * row_stride + offsets
    log_of_sum, scale, column = tl.load(log_z + row), tl.load(scales + row), tl.load(columns + row)
    y = tl.load(place, mask=here, other=0.0).to(tl.float32)
    if has_softcap:
        y = _capped(y, cap)
    gradient = (1.0 + doubled_z_loss * log_of_sum) * tl.exp(y - log_of_sum) - everywhere
    gradient = scale * tl.where(offsets == column, gradient - on_target, gradient)
    if has_softcap:
        gradient *= 1.0 - (y / cap) * (y / cap)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=here)
