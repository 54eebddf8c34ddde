"""The language-model head and its cross-entropy as one operation that never holds [N, V] logits.

N trained targets · D model width · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bytes of one chunk's logits. Large chunks make the three matrix products efficient; beyond this they only cost memory.
CHUNK_BYTES = 64 * 2**20
# Rows a chunk has at least: below it, adding each chunk's gradient to the head's [V, D] costs more than making it.
CHUNK_ROWS = 256
# Softmax works on float32 tiles that stay in a core's cache: 18 ms instead of 70 ms for 1024 x 32000 on two cores.
TILE_BYTES = 2 * 2**20
# Elements of the head's gradient that are widened to float32 at a time.
HEAD_TILE = 4 * 2**20


@dataclass(frozen=True)
class CrossEntropy:
    """What `linear_cross_entropy` returns; every number is a sum over targets, none a mean."""

    total: Tensor  # scalar: sum of weight x (loss + label smoothing + z-loss); carries the gradient
    nll: Tensor  # scalar: sum of weight x negative log-likelihood, without the two extras
    correct: Tensor  # scalar: sum of weight over targets that are the most likely token


@dataclass(frozen=True)
class _Options:
    softcap: float | None
    label_smoothing: float
    z_loss: float
    gradient_scale: float
    chunk_rows: int


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gradient_scale: float = 1.0,
    chunk_rows: int | None = None,
) -> CrossEntropy:
    """Weighted cross-entropy of `hidden @ head.T` against `targets`, chunk by chunk.

    The gradient is computed together with the loss, while a chunk's logits are at hand; the backward pass only hands it
    out. Weights are known beforehand, so nothing is recomputed and one chunk is all that is ever held.

    Args:
        hidden: [N, D], the state each target is predicted from.
        head: [V, D], float32 or hidden's dtype; cast to hidden's dtype for the products.
        targets: [N] int64.   weights: [N] float32.
        softcap: logits become softcap x tanh(logits / softcap) (Gemma 2, arXiv:2408.00118).
        label_smoothing: share of the target's probability spread over the vocabulary (arXiv:1512.00567).
        z_loss: weight of log(Z)^2 (PaLM, arXiv:2204.02311, sec. 5).
        gradient_scale: multiplies the gradients but not the loss; applied before they are rounded to half precision.
        chunk_rows: rows of logits held at once; by default chosen by `CHUNK_BYTES`.
    """
    if chunk_rows is None:
        chunk_rows = max(CHUNK_ROWS, CHUNK_BYTES // (head.shape[0] * hidden.element_size()))
    options = _Options(softcap, label_smoothing, z_loss, gradient_scale, chunk_rows)
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    total, nll, correct = _LinearCrossEntropy.apply(hidden, head, targets, weights, options, wants_gradient)
    return CrossEntropy(total, nll, correct)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, options: _Options, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        narrow = head.to(hidden.dtype)  # [V, D]
        sums = hidden.new_zeros(3, dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_hidden = torch.empty_like(hidden) if gradient and hidden.requires_grad else None
        grad_head: Tensor | None = None
        for start in range(0, hidden.shape[0], options.chunk_rows):
            rows = slice(start, start + options.chunk_rows)
            logits = hidden[rows] @ narrow.t()  # [rows, V]; becomes its own gradient below
            sums += _loss_in_tiles(logits, targets[rows], weights[rows].to(sums.dtype), options, gradient)
            if grad_hidden is not None:
                torch.mm(logits, narrow, out=grad_hidden[rows])
            if gradient and head.requires_grad:
                grad_head = _add_head_gradient(grad_head, head, logits, hidden[rows])
            del logits
        if gradient and head.requires_grad and grad_head is None:  # no target at all
            grad_head = torch.zeros_like(head)
        # Plain attributes, given away in backward: a saved tensor has a second owner, and autograd would copy [V, D]
        # into the head's `.grad` instead of taking it over.
        ctx.gradients = (grad_hidden, grad_head)
        total, nll, correct = sums.unbind()
        ctx.mark_non_differentiable(nll, correct)
        return total, nll, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert ctx.gradients is not None, "the gradient of the cross-entropy was already handed out"
        grad_hidden, grad_head = ctx.gradients
        ctx.gradients = None
        if grad != 1:  # the usual case is the loss itself: leave [V, D] alone
            grad_hidden = None if grad_hidden is None else grad_hidden * grad
            grad_head = None if grad_head is None else grad_head * grad
        return grad_hidden, grad_head, None, None, None, None


def _add_head_gradient(total: Tensor | None, head: Tensor, grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """total [V, D] + grad_logits [rows, V].T @ hidden [rows, D], a slice of the vocabulary at a time.

    Adding a whole bfloat16 [V, D] to a float32 one makes a float32 copy of it first: at V = 128256 that took longer than
    the product itself, and as much memory as the gradient.
    """
    first = total is None
    if total is None:
        total = torch.empty_like(head)
    rows = max(1, HEAD_TILE // head.shape[1])
    for start in range(0, head.shape[0], rows):
        part = grad_logits[:, start : start + rows].t() @ hidden
        place = total[start : start + rows]
        place.copy_(part) if first else place.add_(part)
    return total


def _loss_in_tiles(logits: Tensor, targets: Tensor, weights: Tensor, options: _Options, gradient: bool) -> Tensor:
    """Sums (total, nll, correct) of one chunk; with `gradient`, overwrites `logits` with the gradient by them."""
    vocabulary = logits.shape[1]
    wide = weights.dtype
    tile = max(1, TILE_BYTES // (vocabulary * wide.itemsize)) if logits.device.type == "cpu" else logits.shape[0]
    sums = weights.new_zeros(3)
    smoothing = options.label_smoothing
    for start in range(0, logits.shape[0], tile):
        piece = logits[start : start + tile]
        target = targets[start : start + tile].unsqueeze(1)  # [rows, 1]
        weight = weights[start : start + tile]
        y = piece.to(wide, copy=True)
        if options.softcap is not None:
            y.div_(options.softcap).tanh_().mul_(options.softcap)
        slope = 1 - (y / options.softcap).square_() if gradient and options.softcap is not None else None
        at_target = y.gather(1, target).squeeze(1)
        mean = y.mean(1) if smoothing else None
        highest = y.amax(1)
        y.sub_(highest.unsqueeze(1)).exp_()
        mass = y.sum(1)
        log_z = highest + mass.log()
        nll = log_z - at_target
        loss = nll if mean is None else (1 - smoothing) * nll + smoothing * (log_z - mean)
        if options.z_loss:
            loss = loss + options.z_loss * log_z.square()
        sums += torch.stack([(weight * value).sum() for value in (loss, nll, (at_target >= highest).to(wide))])
        if not gradient:
            continue
        scaled = weight * options.gradient_scale
        # d loss / d y = (1 + 2 z log Z) p - (1 - s) onehot - s / V
        y.mul_((scaled * (1 + 2 * options.z_loss * log_z) / mass).unsqueeze(1))
        if smoothing:
            y.sub_((scaled * (smoothing / vocabulary)).unsqueeze(1))
        y.scatter_add_(1, target, (scaled * (smoothing - 1)).unsqueeze(1))
        if slope is not None:
            y.mul_(slope)
        piece.copy_(y)
    return sums
