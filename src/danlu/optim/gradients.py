"""Gradients of a step: row-sparse ones, the global norm and clipping, and finding the one that is not finite.

An embedding's gradient is row-sparse: a step of 1024 tokens touches at most 1024 of 128256 rows. As a sparse COO tensor
of torch, with n stored rows of D columns out of V, it takes 2 MB instead of 260. It is made dense only while the
optimizer uses it, if at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.layer_types import ReduceGroup


def chunks(tensor: Tensor, elements: int) -> tuple[Tensor, ...]:
    """Views along the first dimension of about `elements` elements each, at least one row; the tensor if it is small.

    Along a dimension, not flat, so that any strides will do: a gradient is often a transposed product. Tensors of one
    shape are always cut alike.
    """
    if tensor.ndim == 0 or tensor.numel() <= elements:
        return (tensor,)
    return torch.split(tensor, max(1, elements * tensor.shape[0] // tensor.numel()))


# Above this share of rows, indices and values are no smaller than the dense gradient while both are summed.
MAX_ROW_SHARE = 0.25


@torch.no_grad()
def coalesce_gradients(parameters: Iterable[Parameter]) -> None:
    """Sums rows that are stored twice, as after several micro-batches, and makes a well-filled gradient dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            grad = parameter.grad.coalesce()
            parameter.grad = grad.to_dense() if grad._nnz() > MAX_ROW_SHARE * grad.shape[0] else grad


def stored_values(grad: Tensor) -> Tensor:
    """The elements that a gradient stores: [n, D] of a coalesced row-sparse one, else the gradient itself."""
    return grad._values() if grad.is_sparse else grad


@torch.no_grad()
def densify_gradient(parameter: Parameter) -> None:
    """Replaces a row-sparse gradient by a dense one [V, D]."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def has_sparse_gradient(parameter: Parameter) -> bool:
    """Whether the parameter's gradient is row-sparse."""
    return parameter.grad is not None and parameter.grad.is_sparse


# Elements with squares that are summed in float32 before float64 takes over. torch's own norm sums a whole tensor in
# float32 on CPU and is 3.5e-4 too small on 16M elements; in chunks it is right to 1e-6 at the same speed.
_CHUNK_CPU = 1 << 18


class HasGradient(Protocol):
    """A parameter, or a tensor that stands for one until the step (`galore.LowRankGradient`)."""

    grad: Tensor | None


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[HasGradient],
    max_norm: float | None,
    scale: float = 1.0,
    *,
    group: ReduceGroup | None = None,
    norm_weights: Mapping[Any, float] | None = None,
    device: torch.device | None = None,
) -> float:
    """Multiplies all gradients by `scale`, then by the factor that brings their global 2-norm down to `max_norm`, in
    one pass.

    Args: parameters    those without a gradient are skipped; row-sparse gradients must be coalesced
    (`coalesce_gradients`) max_norm      None only scales scale         usually 1 / (weight of the step x loss scale)
    group         the processes among which parameters are sharded; their squares are summed norm_weights  the factor of
    the square of a parameter's gradient on this process, 1 / n where n processes hold the same shard of it; by default
    1 device        where the sums of several devices and of the processes are added up; by default that of the first
    gradient. All processes give the same kind, or they would wait in collectives of two backends. Returns the norm
    after scaling and before clipping. If it is not finite, no gradient has been changed, and the step must be left out:
    `non_finite` names the gradients, none where single squares overflowed float32 (elements above 1e19).
    """
    norms = clip_grad_norms({"": parameters}, max_norm, scale, group=group, norm_weights=norm_weights, device=device)
    return norms[""]


@torch.no_grad()
def clip_grad_norms(
    parameters: Mapping[str, Iterable[HasGradient]],
    max_norm: float | None,
    scale: float = 1.0,
    *,
    group: ReduceGroup | None = None,
    norm_weights: Mapping[Any, float] | None = None,
    device: torch.device | None = None,
) -> dict[str, float]:
    """`clip_grad_norm` of several sets of parameters by name, each with a norm and a bound of its own.

    One large gradient then does not make those of another model small. Every process gives the same names. If any norm
    is not finite, no gradient of any set has been changed.
    """
    grads, norms = dict[str, list[Tensor]](), dict[str, float]()
    for name, own in parameters.items():
        holders = [holder for holder in own if holder.grad is not None]
        grads[name] = [stored_values(holder.grad) for holder in holders if holder.grad is not None]
        weights = [1.0 if norm_weights is None else norm_weights[holder] for holder in holders]
        norms[name] = abs(scale) * _global_norm(grads[name], weights, group, device)
    if not all(math.isfinite(norm) for norm in norms.values()):
        return norms
    for name, norm in norms.items():
        factor = scale if max_norm is None or norm <= max_norm else scale * (max_norm / norm)
        if factor != 1.0:
            for grad in grads[name]:
                grad.mul_(factor)
    return norms


@torch.no_grad()
def non_finite(named_gradients: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity, in the order given. Allocates nothing of their size."""
    names = []
    for name, tensor in named_gradients:
        if tensor is None or stored_values(tensor).numel() == 0:
            continue
        lowest, highest = torch.aminmax(stored_values(tensor))  # both are NaN when any element is
        if not (math.isfinite(lowest.item()) and math.isfinite(highest.item())):
            names.append(name)
    return names


def _global_norm(
    grads: list[Tensor], weights: list[float], group: ReduceGroup | None, device: torch.device | None
) -> float:
    """The 2-norm: squares summed in float32 within a chunk, in float64 over chunks, devices and processes.

    The order is always the same, so the bits are too.
    """
    by_device: dict[torch.device, list[tuple[Tensor, float]]] = {}
    for grad, weight in zip(grads, weights, strict=True):
        # CUDA sums by trees, which is accurate at any size.
        for chunk in chunks(grad, grad.numel() if grad.is_cuda else _CHUNK_CPU):
            if chunk.numel():
                by_device.setdefault(chunk.device, []).append((chunk, weight))
    if device is None:
        device = next(iter(by_device), torch.device("cpu"))
    sums = [_sum_of_squares(weighted).to(device) for weighted in by_device.values()]
    # A process that holds no element takes part with a zero on the same device as the others.
    total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    return math.sqrt((total if group is None else group.sum(total)).item())


def _sum_of_squares(weighted: list[tuple[Tensor, float]]) -> Tensor:
    """The sum over (chunk, weight) of one device of weight x squares; float64, shape [], on that device."""
    # One transfer at the end: reading each norm would make CUDA wait for each.
    squares = torch.stack([torch.linalg.vector_norm(chunk).double() for chunk, _ in weighted]).square_()
    if any(weight != 1.0 for _, weight in weighted):
        squares *= torch.tensor([weight for _, weight in weighted], dtype=torch.float64, device=squares.device)
    return squares.sum()
