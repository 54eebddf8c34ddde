"""The global gradient norm, clipping, and finding the gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from danlu.optim.chunks import chunks
from danlu.optim.sparse import numbers
from danlu.types import ReduceGroup

# Elements whose squares are summed in float32 before float64 takes over. torch's own norm sums a whole tensor in
# float32 on CPU and is 3.5e-4 too small on 16M elements; in pieces it is right to 1e-6 at the same speed.
_PIECE_CPU = 1 << 18


class HasGradient(Protocol):
    """A parameter, or what stands for one until the step (`galore.LowRankGradient`)."""

    grad: Tensor | None


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[HasGradient],
    max_norm: float | None,
    scale: float = 1.0,
    *,
    group: ReduceGroup | None = None,
    shares: Mapping[Any, float] | None = None,
    device: torch.device | None = None,
) -> float:
    """Multiplies all gradients by `scale`, then by what brings their global 2-norm down to `max_norm`, in one pass.

    Args: `scale` is usually 1 / (global weight x loss scale); `max_norm` None only scales. Parameters without a
    gradient are skipped; gradients of rows must be `sparse.compact`. `group`: the processes among which parameters are
    dealt out; `shares`: what of a parameter's square counts on this one, where several hold the same part of it.
    `device`: of the run, where gradients of several devices are added up and the processes' sums too; by default that
    of the first gradient. Every process gives the same kind, or they would wait in collectives of two backends.
    Returns the norm after scaling and before clipping. If it is not finite, no gradient has been touched: the step must
    be left out. `non_finite` tells whose it is; none when single squares overflowed float32 (elements above 1e19).
    """
    holders = [one for one in parameters if one.grad is not None]
    grads = [numbers(one.grad) for one in holders if one.grad is not None]
    counted = [1.0 if shares is None else shares[one] for one in holders]
    norm = abs(scale) * _global_norm(grads, counted, group, device)
    if not math.isfinite(norm):
        return norm
    factor = scale if max_norm is None or norm <= max_norm else scale * (max_norm / norm)
    if factor != 1.0:
        for grad in grads:
            grad.mul_(factor)
    return norm


@torch.no_grad()
def non_finite(named_gradients: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity, in the order given. Allocates nothing of their size."""
    names = []
    for name, tensor in named_gradients:
        if tensor is None or numbers(tensor).numel() == 0:
            continue
        lowest, highest = torch.aminmax(numbers(tensor))  # both are NaN when any element is
        if not (math.isfinite(lowest.item()) and math.isfinite(highest.item())):
            names.append(name)
    return names


def _global_norm(
    grads: list[Tensor], shares: list[float], group: ReduceGroup | None, device: torch.device | None
) -> float:
    """Squares in float32 within a piece, in float64 across pieces, devices and processes, always in the same order."""
    by_device: dict[torch.device, list[tuple[Tensor, float]]] = {}
    for grad, share in zip(grads, shares, strict=True):
        # CUDA sums by trees, which is accurate at any size.
        for piece in chunks(grad, grad.numel() if grad.is_cuda else _PIECE_CPU):
            if piece.numel():
                by_device.setdefault(piece.device, []).append((piece, share))
    if device is None:
        device = next(iter(by_device), torch.device("cpu"))
    sums = [_sum_of_squares(cut).to(device) for cut in by_device.values()]
    # A process that holds no element has its zero where the others have their sums.
    total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    return math.sqrt((total if group is None else group.sum(total)).item())


def _sum_of_squares(cut: list[tuple[Tensor, float]]) -> Tensor:
    """Of pieces of one device, each times its share; float64, there."""
    # One transfer at the end: reading each norm would make CUDA wait for each.
    squares = torch.stack([torch.linalg.vector_norm(piece).double() for piece, _ in cut]).square_()
    if any(share != 1.0 for _, share in cut):
        squares *= torch.tensor([share for _, share in cut], dtype=torch.float64, device=squares.device)
    return squares.sum()
