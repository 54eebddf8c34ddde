"""Where low-rank factors start when they start in the weights: PiSSA, OLoRA, LoftQ.

Each takes W [O, I] and gives A [r, I], B [O, r] such that the base becomes W - s B A (LoftQ: what quantization makes of
it): the layer still computes W, or nearly, and training moves along the directions that were taken out.

O, I outputs and inputs of a layer · r rank · s scale
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Start:
    """Factors to start from, and the base that is left, float32."""

    a: Tensor  # [r, I]
    b: Tensor  # [O, r]
    base: Tensor  # [O, I]


def pissa(weight: Tensor, rank: int, scale: float, *, iterations: int | None, generator: torch.Generator) -> Start:
    """Principal singular values and vectors (PiSSA, arXiv:2404.02948, sec. 3): B = U sqrt(S / s), A = sqrt(S / s) V^T.

    iterations: of a randomised SVD (arXiv:0909.4061) instead of the exact one.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if iterations is None:
        u, s, vh = torch.linalg.svd(wide, full_matrices=False)
        u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    else:
        u, s, vh = _randomised_svd(wide, rank, iterations, generator)
    root = (s / scale).sqrt()
    a, b = root.unsqueeze(1) * vh, u * root
    return Start(a, b, wide.addmm(b, a, alpha=-scale))


def olora(weight: Tensor, rank: int, scale: float) -> Start:
    """W = Q R; B the first r columns of Q, A the first r rows of R (OLoRA, arXiv:2406.01775, algorithm 1)."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    q, r = torch.linalg.qr(wide)
    a, b = r[:rank].contiguous(), q[:, :rank].contiguous()
    return Start(a, b, wide.addmm(b, a, alpha=-scale))


def loftq(weight: Tensor, rank: int, scale: float, *, iterations: int, rounded: Callable[[Tensor], Tensor]) -> Start:
    """Q = quantized(W - s B A) and s B A = the best of rank r for W - Q, in turn (LoftQ, arXiv:2310.08659, alg. 1).

    rounded: a matrix as it comes back from quantization. The base that is returned is what has to be quantized once
    more: `rounded` of it is Q.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rest = wide
    for _ in range(iterations):
        u, s, vh = torch.linalg.svd(wide - rounded(rest), full_matrices=False)
        root = (s[:rank] / scale).sqrt()
        a, b = root.unsqueeze(1) * vh[:rank], u[:, :rank] * root
        last, rest = rest, wide.addmm(b, a, alpha=-scale)
    return Start(a, b, last)


def _randomised_svd(
    weight: Tensor, rank: int, iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """U [O, r], S [r], V^T [r, I]: the range of W from random probes, sharpened by power iterations."""
    probes = min(min(weight.shape), rank + 8)
    omega = torch.empty(weight.shape[1], probes).normal_(generator=generator).to(weight)
    q = torch.linalg.qr(weight @ omega).Q
    for _ in range(iterations):
        q = torch.linalg.qr(weight.t() @ q).Q
        q = torch.linalg.qr(weight @ q).Q
    u, s, vh = torch.linalg.svd(q.t() @ weight, full_matrices=False)
    return q @ u[:, :rank], s[:rank], vh[:rank]
