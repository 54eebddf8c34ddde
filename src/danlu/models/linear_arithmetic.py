"""Linear layers with an arithmetic of their own (`core.layer_types.LinearArithmetic`) as operations of autograd.

Layers that share their input encode it once and keep it once. A gated activation in front of a layer keeps its gate and
its other factor in few bits, and the layer's input is computed from these again (DeepSeek-V3, arXiv:2412.19437, section
3.3.2). Weights' gradients may be left to the pipeline's queue, as those of `models.ops`.

T tokens · N rows of experts · I, O inputs and outputs of a layer · F inner width · G groups
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from danlu.core.layer_types import LinearArithmetic
from danlu.core.weight_gradients import Deferral, deferral_of, made_or_deferred
from danlu.models import ops
from danlu.models.layer_spec import Activation


class Products(NamedTuple):
    """The products of an arithmetic with one input, of single layers or of groups of rows."""

    arithmetic: LinearArithmetic
    counts: Tensor | None = None
    """[G]: rows of each layer, of stacked ones."""
    kept: tuple[Tensor, ...] = ()
    """Codes of x (`LinearArithmetic.keep`), of rows that have come so; x then has a shape and a type alone."""

    def forward(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the outputs, and what is kept of x."""
        if self.kept:
            codes = self.arithmetic.row_codes
            assert self.counts is not None and codes is not None, "rows that travel are those of experts"
            return codes.grouped_forward_of_kept(self.kept, weights, self.counts, x.dtype), self.kept
        if self.counts is None:
            return self.arithmetic.forward(x, weights)
        return self.arithmetic.grouped_forward(x, weights, self.counts)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of x through one of the weights."""
        if self.counts is None:
            return self.arithmetic.input_gradient(grad, weight)
        return self.arithmetic.grouped_input_gradient(grad, weight, self.counts)

    def weight_gradient(self, dtype: torch.dtype, grad: Tensor, *kept: Tensor) -> tuple[Tensor]:
        """Returns the gradient of a weight, in its dtype."""
        if self.counts is None:
            return (self.arithmetic.weight_gradient(grad, kept).to(dtype),)
        return (self.arithmetic.grouped_weight_gradient(grad, kept, self.counts).to(dtype),)


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arithmetic: LinearArithmetic,
    counts: Tensor | None = None,
    kept: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:
    """x [T, I] times each weight [O, I], plus its bias [O] -> [T, O] of each in x's dtype.

    counts [G]: of stacked layers, weights [G, O, I] and biases [G, O], with rows x [N, I] of each layer together. kept:
    of rows that have come as codes (`DispatchedRows`), which are multiplied in x's place.
    """
    products = Products(arithmetic, counts, kept)
    if not torch.is_grad_enabled():
        outputs, _ = products.forward(x, weights)
    else:
        deferral = deferral_of(*weights)
        outputs = _Linears.apply(x, products, tuple(weights), deferral, *_in_autograd(weights, deferral))
    return tuple(_plus(y, bias, counts) for y, bias in zip(outputs, biases, strict=True))


def gated_linear(
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    weight: Tensor,
    bias: Tensor | None,
    arithmetic: LinearArithmetic,
    counts: Tensor | None = None,
) -> Tensor:
    """activation(gate) * up, of [T, F] each, times weight [O, F], plus bias [O] -> [T, O].

    The backward pass is left gate and up in few bits. counts: as in `linears`.
    """
    products = Products(arithmetic, counts)
    if not torch.is_grad_enabled():
        (y,), _ = products.forward(ops.gated_mlp_activation(gate, up, activation), (weight,))
    else:
        deferral = deferral_of(weight)
        (stand_in,) = _in_autograd((weight,), deferral)
        y = _GatedLinear.apply(gate, up, products, activation, weight, deferral, stand_in)
    return _plus(y, bias, counts)


def _plus(y: Tensor, bias: Tensor | None, counts: Tensor | None) -> Tensor:
    if bias is None:
        return y
    return y + bias.to(y.dtype) if counts is None else ops.with_bias_of_group(y, counts, bias)


def _in_autograd(weights: Sequence[Tensor], deferral: Deferral | None) -> list[Tensor]:
    """The tensors that autograd is given for the weights: the queue's anchor for those with gradients that may wait."""
    if deferral is None:
        return list(weights)
    return [deferral.anchor if weight.requires_grad else weight for weight in weights]


def _gradient_of_weight(
    deferral: Deferral | None, products: Products, dtype: torch.dtype, grad: Tensor, kept: Sequence[Tensor]
) -> Tensor | None:
    """Returns the gradient of one weight; None where it is left to the queue.

    deferral: of the weight as the forward pass had it. A saved tensor may be another object, with a gradient of its
    own, where hooks pack saved tensors (`memory.recompute`, the pipeline's activations).
    """
    make: Callable[..., Sequence[Tensor]] = partial(products.weight_gradient, dtype)
    (gradient,) = made_or_deferred(deferral, make, grad, *kept)
    return gradient


class _Linears(torch.autograd.Function):
    """Keeps of x what the arithmetic says, and only for a weight that is trained; and the weights as they are stored.

    The weights are given twice: as they are, and as autograd sees them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        products: Products,
        weights: tuple[Tensor, ...],
        deferral: Deferral | None,
        *in_autograd: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, kept = products.forward(x, weights)
        kept = kept if any(weight.requires_grad for weight in weights) else ()
        ctx.products, ctx.deferral = Products(products.arithmetic), deferral
        ctx.count, ctx.is_grouped = len(weights), products.counts is not None
        counts = () if products.counts is None else (products.counts,)
        ctx.save_for_backward(*weights, *counts, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        weights, rest = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        products, kept = _with_counts(ctx, rest)
        wants_x, _, _, _, *wanted = ctx.needs_input_grad
        grad_x: Tensor | None = None
        results: list[Tensor | None] = []
        deferred = iter(() if ctx.deferral is None else ctx.deferral.weights)  # those that are trained, in their order
        for weight, grad, wants in zip(weights, grads, wanted, strict=True):
            if wants_x:
                part = products.input_gradient(grad, weight)
                grad_x = part if grad_x is None else grad_x.add_(part)
            own = ctx.deferral.only(next(deferred)) if wants and ctx.deferral is not None else None
            results.append(_gradient_of_weight(own, products, weight.dtype, grad, kept) if wants else None)
        return grad_x, None, None, None, *results


class _GatedLinear(torch.autograd.Function):
    """Keeps gate and up in few bits, and computes from them again what they are multiplied to."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        products: Products,
        activation: Activation,
        weight: Tensor,
        deferral: Deferral | None,
        in_autograd: Tensor,
    ) -> Tensor:
        (y,), _ = products.forward(ops.gated_mlp_activation(gate, up, activation), (weight,))
        of_gate, of_up = products.arithmetic.keep(gate), products.arithmetic.keep(up)
        ctx.products, ctx.deferral, ctx.activation = products._replace(counts=None), deferral, activation
        ctx.dtype, ctx.split, ctx.is_grouped = gate.dtype, len(of_gate), products.counts is not None
        counts = () if products.counts is None else (products.counts,)
        ctx.save_for_backward(weight, *counts, *of_gate, *of_up)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        weight, *rest = ctx.saved_tensors
        products, kept = _with_counts(ctx, rest)
        arithmetic = products.arithmetic
        gate, up = (
            arithmetic.kept_values(part, ctx.dtype).requires_grad_() for part in (kept[: ctx.split], kept[ctx.split :])
        )
        with torch.enable_grad():
            activated = ops.gated_mlp_activation(gate, up, ctx.activation)
        grad_weight = None
        if ctx.needs_input_grad[6]:
            of_activated = arithmetic.keep(activated.detach())
            grad_weight = _gradient_of_weight(ctx.deferral, products, weight.dtype, grad, of_activated)
        grad_gate, grad_up = torch.autograd.grad(activated, (gate, up), products.input_gradient(grad, weight))
        return grad_gate, grad_up, None, None, None, None, grad_weight


def _with_counts(ctx: Any, rest: Sequence[Tensor]) -> tuple[Products, Sequence[Tensor]]:
    """The products with their counts, which are the first of the saved tensors behind the weights, and the others."""
    products: Products = ctx.products
    if not ctx.is_grouped:
        return products, rest
    return products._replace(counts=rest[0]), rest[1:]
