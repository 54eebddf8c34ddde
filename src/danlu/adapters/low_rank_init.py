"""Initial low-rank factors that are computed from the weight: PiSSA, OLoRA, LoftQ.

Each takes W [O, I] and returns A [r, I], B [O, r] and the remaining base W - s B A (for LoftQ, the matrix to quantize):
with its adapter the layer still computes W, or nearly, and training moves along the directions of B A.

O, I outputs and inputs of a layer · r rank · s scale
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from danlu.adapters.adapter import in_float32
from danlu.adapters.lora import LowRank
from danlu.core.errors import ModelError


@dataclass(frozen=True)
class InitialFactors:
    """Factors to start from, and the base that is left, float32 or wider."""

    a: Tensor  # [r, I]
    b: Tensor  # [O, r]
    base: Tensor  # [O, I]


def pissa(
    weight: Tensor, rank: int, scale: float, *, iterations: int | None, generator: torch.Generator
) -> InitialFactors:
    """Principal singular values and vectors (PiSSA, arXiv:2404.02948, sec. 3): B = U sqrt(S / s), A = sqrt(S / s) V^T.

    iterations: power iterations of a randomised SVD (arXiv:0909.4061), drawn from `generator`; None: the exact SVD.
    """
    wide = in_float32(weight)
    if iterations is None:
        u, s, vh = torch.linalg.svd(wide, full_matrices=False)
        u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    else:
        u, s, vh = _randomised_svd(wide, rank, iterations, generator)
    root = (s / scale).sqrt()
    a, b = root.unsqueeze(1) * vh, u * root
    return InitialFactors(a, b, wide.addmm(b, a, alpha=-scale))


def olora(weight: Tensor, rank: int, scale: float) -> InitialFactors:
    """W = Q R; B the first r columns of Q, A the first r rows of R (OLoRA, arXiv:2406.01775, algorithm 1)."""
    wide = in_float32(weight)
    q, r = torch.linalg.qr(wide)
    a, b = r[:rank].contiguous(), q[:, :rank].contiguous()
    return InitialFactors(a, b, wide.addmm(b, a, alpha=-scale))


def loftq(
    weight: Tensor, rank: int, scale: float, *, iterations: int, quantize_dequantize: Callable[[Tensor], Tensor]
) -> InitialFactors:
    """Alternates Q = quantized(W - s B A) and s B A = rank-r approximation of W - Q (LoftQ, arXiv:2310.08659, alg. 1).

    quantize_dequantize: a matrix as it comes back from quantization. The base that is returned is not quantized yet:
    `quantize_dequantize` of it is Q.
    """
    wide = in_float32(weight)
    residual = wide
    for _ in range(iterations):
        u, s, vh = torch.linalg.svd(wide - quantize_dequantize(residual), full_matrices=False)
        root = (s[:rank] / scale).sqrt()
        a, b = root.unsqueeze(1) * vh[:rank], u[:, :rank] * root
        # A and B belong to the residual that was quantized for them, not to the one that they leave.
        base, residual = residual, wide.addmm(b, a, alpha=-scale)
    return InitialFactors(a, b, base)


def initialize_from_base(
    module: LowRank,
    weight: Tensor,
    section: Any,
    site_name: str,
    *,
    generator: torch.Generator,
    quantize_dequantize: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Sets a module's initial factors from the weight [O, I] by the section's `init`; returns the remaining base.

    Where the module has initial factors already, from a run that is resumed, these are subtracted.

    Args:
        generator: the generator of a randomised SVD.
        quantize_dequantize: see `loftq`; None where the base is not quantized.

    Raises ModelError where LoftQ gives other factors than the run began with: its base would be another one.
    """
    scale, rank = module.scale, module.rank
    resumed = None if module.initial_A is None or module.initial_B is None else (module.initial_A, module.initial_B)
    if resumed is not None and section.init != "loftq":
        return in_float32(weight).addmm(resumed[1], resumed[0], alpha=-scale)
    match section.init:
        case "pissa":
            initial = pissa(weight, rank, scale, iterations=section.svd_iterations, generator=generator)
        case "olora":
            initial = olora(weight, rank, scale)
        case _:
            assert quantize_dequantize is not None, "the recipe's rules ask for quantization with loftq"
            iterations = section.loftq_iterations
            initial = loftq(weight, rank, scale, iterations=iterations, quantize_dequantize=quantize_dequantize)
    if resumed is None:
        module.set_initial_factors(initial.a, initial.b)
    elif not (torch.equal(initial.a, resumed[0]) and torch.equal(initial.b, resumed[1])):
        raise ModelError(
            f"{site_name}: LoftQ finds another start here than where the run began (another processor or number of "
            "threads), and with it another base. Go on where it began, or start again from the exported adapter"
        )
    return initial.base


def _randomised_svd(
    weight: Tensor, rank: int, iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes U [O, r], S [r], V^T [r, I] of W; random probes and power iterations estimate its range."""
    probes = min(min(weight.shape), rank + 8)
    omega = torch.empty(weight.shape[1], probes).normal_(generator=generator).to(weight)
    q = torch.linalg.qr(weight @ omega).Q
    for _ in range(iterations):
        q = torch.linalg.qr(weight.t() @ q).Q
        q = torch.linalg.qr(weight @ q).Q
    u, s, vh = torch.linalg.svd(q.t() @ weight, full_matrices=False)
    return q @ u[:, :rank], s[:rank], vh[:rank]
