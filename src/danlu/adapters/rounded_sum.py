"""LoRA under quantization-aware training: the sum of base and adapter is rounded, as the merged weight will be.

y = x Q(W + s B A)^T, where Q rounds to a format of few bits. Gradients pass through Q as through the identity, so those
of A and B are LoRA's own, by products of rank r: no gradient [O, I] is made. torchtune rounds the base and adds the
adapter's output in the type of activations; merging then rounds once more, to another model than the trained one.

T tokens · O, I outputs and inputs · r rank
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.adapters.adapter import saved_inputs
from danlu.core.layer_types import LinearLayer, LowRankSum, Recomputed, WeightRounding
from danlu.core.weight_gradients import Deferral, deferral_of, made_or_deferred


class RoundedSum(NamedTuple):
    """A layer with a weight that is rounded together with an adapter."""

    linear: LinearLayer
    rounding: WeightRounding
    added: LowRankSum

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Returns Q(W + s B A) [O, I]."""
        return self.rounding.numbers(self.linear.stored_weight, dtype, self.added)

    def in_workspace(self, dtype: torch.dtype) -> AbstractContextManager[Tensor]:
        """Q(W + s B A) [O, I], not to keep."""
        return self.rounding.in_workspace(self.linear.stored_weight, dtype, self.added)

    def product(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O], without the bias."""
        with self.in_workspace(x.dtype) as matrix:
            return F.linear(x, matrix)


def rounded_sums(x: Tensor, sums: Sequence[RoundedSum], recomputed: Recomputed | None = None) -> tuple[Tensor, ...]:
    """x [T, I] through each layer -> [T, O] of each, in x's dtype.

    recomputed: how to make x again in the backward pass instead of keeping it.
    """
    if not sums:
        return ()
    if not torch.is_grad_enabled():
        outputs = tuple(each.product(x) for each in sums)
    else:
        flat = [factor for each in sums for factor in (each.added.a, each.added.b)]
        deferral = deferral_of(*flat)
        anchored = flat if deferral is None else [deferral.anchor if each.requires_grad else each for each in flat]
        outputs = _RoundedSums.apply(x, tuple(sums), deferral, recomputed, *anchored)
    biases = (each.linear.added_bias for each in sums)
    return tuple(y if bias is None else y + bias.to(y.dtype) for y, bias in zip(outputs, biases, strict=True))


class _RoundedSums(torch.autograd.Function):
    """Keeps x, where a factor is trained, and no rounded weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sums: tuple[RoundedSum, ...],
        deferral: Deferral | None,
        recomputed: Recomputed | None,
        *in_autograd: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.sums, ctx.deferral = sums, deferral
        trained = any(factor.requires_grad for each in sums for factor in (each.added.a, each.added.b))
        # Without its tensors: recomputation and offload can only free what `save_for_backward` was given.
        ctx.recomputed = None if recomputed is None else recomputed._replace(inputs=())
        ctx.save_for_backward(*(saved_inputs(x, recomputed) if trained else ()))
        return tuple(each.product(x) for each in sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        wants_x, _, _, _, *wanted = ctx.needs_input_grad
        grad_x: Tensor | None = None
        results: list[Tensor | None] = [None] * len(wanted)
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        if saved and ctx.recomputed is not None:
            saved = (ctx.recomputed.function(*saved),)
        for index, (each, grad) in enumerate(zip(ctx.sums, grads, strict=True)):
            if wants_x:
                with each.in_workspace(grad.dtype) as matrix:
                    part = grad @ matrix
                grad_x = part if grad_x is None else grad_x.add_(part)
            for at, factor, gradient in (
                (2 * index, each.added.a, _gradient_of_a),
                (2 * index + 1, each.added.b, _gradient_of_b),
            ):
                if wanted[at]:
                    own = None if ctx.deferral is None else ctx.deferral.only(factor)
                    (results[at],) = made_or_deferred(own, partial(gradient, each.added), grad, *saved)
        return grad_x, None, None, None, *results


def _gradient_of_a(added: LowRankSum, grad: Tensor, x: Tensor) -> tuple[Tensor]:
    """grad [T, O] and x [T, I] -> [r, I]."""
    low = grad @ (added.b * added.scale).to(grad.dtype)  # [T, r]
    return ((low.t() @ x.to(grad.dtype)).to(added.a.dtype),)


def _gradient_of_b(added: LowRankSum, grad: Tensor, x: Tensor) -> tuple[Tensor]:
    """grad [T, O] and x [T, I] -> [O, r]."""
    low = x.to(grad.dtype) @ added.a.to(grad.dtype).t()  # [T, r]
    return ((grad.t() @ low).to(added.b.dtype).mul_(added.scale),)
