"""The language-model head and its cross-entropy as one operation that never holds [N, V] logits.

The vocabulary is gone through in slices, twice: once for the softmax's denominator, once for the gradient, which is
then complete for its slice. Making the logits a second time costs one matrix product in four. Going by rows instead
would make them once, but add a [V, D] gradient to the last one for every few hundred rows and hold a narrow copy of
the head: at V = 128256 that is no faster, and takes 0.3 GB more.

N trained targets · D model width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bytes of one slice's float32 logits. On CPU they stay in the cores' caches; a GPU wants large products.
SLICE_BYTES_CPU = 4 * 2**20
SLICE_BYTES_CUDA = 128 * 2**20
NARROWEST_SLICE = 256


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
    slice_rows: int


def slice_bytes(device_type: str) -> int:
    """Memory that the logits take while this works, float32 and narrow copy together, in bytes."""
    return 2 * (SLICE_BYTES_CPU if device_type == "cpu" else SLICE_BYTES_CUDA)


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
    slice_rows: int | None = None,
) -> CrossEntropy:
    """Weighted cross-entropy of `hidden @ head.T` against `targets`.

    The gradient is computed together with the loss, which is possible because the weights are known beforehand; the
    backward pass only hands it out.

    Args:
        hidden: [N, D], the state each target is predicted from.
        head: [V, D], float32 or hidden's dtype; cast to hidden's dtype for the products.
        targets: [N] int64.   weights: [N] float32.
        softcap: logits become softcap x tanh(logits / softcap) (Gemma 2, arXiv:2408.00118).
        label_smoothing: share of the target's probability spread over the vocabulary (arXiv:1512.00567).
        z_loss: weight of log(Z)^2 (PaLM, arXiv:2204.02311, sec. 5).
        gradient_scale: multiplies the gradients but not the loss; applied before they are rounded to half precision.
        slice_rows: S; by default as many as `slice_bytes` allows.
    """
    if slice_rows is None:
        room = slice_bytes(hidden.device.type) // 2
        slice_rows = max(NARROWEST_SLICE, room // (4 * max(1, hidden.shape[0])))
    options = _Options(softcap, label_smoothing, z_loss, gradient_scale, slice_rows)
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    total, nll, correct = _LinearCrossEntropy.apply(hidden, head, targets, weights, options, wants_gradient)
    return CrossEntropy(total, nll, correct)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, options: _Options, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = weights.to(wide)
        slices = _Slices(hidden, head, targets, options)
        rows = _softmax_statistics(slices, wide)
        nll = rows.log_z - rows.at_target
        loss = nll
        if options.label_smoothing:
            loss = nll + options.label_smoothing * (rows.at_target - rows.sum / head.shape[0])
        if options.z_loss:
            loss = loss + options.z_loss * rows.log_z.square()
        correct = (rows.at_target >= rows.highest).to(wide)
        # Plain attributes, given away in backward: a saved tensor has a second owner, and autograd would copy [V, D]
        # into the head's `.grad` instead of taking it over.
        ctx.gradients = _gradients(slices, rows, weights, head.requires_grad) if gradient else (None, None)
        sums = [(weights * value).sum() for value in (loss, nll, correct)]
        ctx.mark_non_differentiable(*sums[1:])
        return sums[0], sums[1], sums[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert ctx.gradients is not None, "the gradient of the cross-entropy was already handed out"
        grad_hidden, grad_head = ctx.gradients
        ctx.gradients = None
        if grad != 1:  # the usual case is the loss itself: leave [V, D] alone
            grad_hidden = None if grad_hidden is None else grad_hidden * grad
            grad_head = None if grad_head is None else grad_head * grad
        return grad_hidden, grad_head, None, None, None, None


@dataclass(frozen=True)
class _Slices:
    """The head in slices of its vocabulary, and the logits that each gives."""

    hidden: Tensor
    head: Tensor
    targets: Tensor
    options: _Options

    def __iter__(self) -> Iterator[_Slice]:
        for start in range(0, self.head.shape[0], self.options.slice_rows):
            head = self.head[start : start + self.options.slice_rows].to(self.hidden.dtype)  # [S, D]
            place = self.targets - start
            inside = (place >= 0) & (place < head.shape[0])
            yield _Slice(start, head, place.clamp_(0, head.shape[0] - 1).unsqueeze(1), inside)

    def logits(self, part: _Slice, wide: torch.dtype) -> Tensor:
        """[N, S]; the same bits each time."""
        y = (self.hidden @ part.head.t()).to(wide)
        cap = self.options.softcap
        return y if cap is None else y.div_(cap).tanh_().mul_(cap)


@dataclass(frozen=True)
class _Slice:
    start: int
    head: Tensor  # [S, D] in hidden's dtype
    place: Tensor  # [N, 1] int64: of each target in this slice; anywhere if it is in another one
    inside: Tensor  # [N] bool


@dataclass(frozen=True)
class _Rows:
    """What each row of logits comes to, [N] each."""

    highest: Tensor
    log_z: Tensor
    at_target: Tensor
    sum: Tensor


def _softmax_statistics(slices: _Slices, wide: torch.dtype) -> _Rows:
    """One pass over the logits with a running maximum (arXiv:1805.02867)."""
    count = slices.hidden.shape[0]
    highest = slices.hidden.new_full((count,), float("-inf"), dtype=wide)
    mass, at_target, total = (torch.zeros_like(highest) for _ in range(3))
    for part in slices:
        y = slices.logits(part, wide)
        at_target += y.gather(1, part.place).squeeze(1).masked_fill_(~part.inside, 0)
        if slices.options.label_smoothing:
            total += y.sum(1)
        raised = torch.maximum(highest, y.amax(1))
        mass.mul_((highest - raised).exp_()).add_(y.sub_(raised.unsqueeze(1)).exp_().sum(1))
        highest = raised
    return _Rows(highest, highest + mass.log(), at_target, total)


def _gradients(slices: _Slices, rows: _Rows, weights: Tensor, for_head: bool) -> tuple[Tensor, Tensor | None]:
    """By hidden [N, D] and head [V, D], for an upstream gradient of one.

    d loss / d y = (1 + 2 z log Z) p - (1 - s) onehot - s / V, times each row's weight
    """
    hidden, head, options = slices.hidden, slices.head, slices.options
    scaled = weights * options.gradient_scale
    on_probability = (scaled * (1 + 2 * options.z_loss * rows.log_z)).unsqueeze(1)
    on_target = (scaled * (options.label_smoothing - 1)).unsqueeze(1)
    on_all = (scaled * (options.label_smoothing / head.shape[0])).unsqueeze(1)
    grad_hidden = torch.zeros_like(hidden, dtype=weights.dtype)
    grad_head = torch.empty_like(head) if for_head else None
    for part in slices:
        y = slices.logits(part, weights.dtype)
        slope = None if options.softcap is None else 1 - (y / options.softcap).square_()
        y.sub_(rows.log_z.unsqueeze(1)).exp_().mul_(on_probability)
        if options.label_smoothing:
            y.sub_(on_all)
        y.scatter_add_(1, part.place, on_target.masked_fill(~part.inside.unsqueeze(1), 0))
        if slope is not None:
            y.mul_(slope)
        grad = y.to(hidden.dtype)  # [N, S]
        grad_hidden += grad @ part.head
        if grad_head is not None:
            grad_head[part.start : part.start + part.head.shape[0]] = grad.t() @ hidden
    return grad_hidden.to(hidden.dtype), grad_head
