"""The decoder's arithmetic: where float32 weights meet activations of a narrower type.

Weights stay float32 while activations are bfloat16 or float16. A product casts its weight on the fly, in the forward
and again in the backward pass, and hands back a float32 gradient: no second copy of the weights is held (a pass over
1024 tokens costs about 1 % more for it), and the optimizer works on full-precision masters without extra steps.

T tokens · I in features · O out features · D model width · H query heads · K key/value heads · C head width
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.layer_types import NormShard, StackedQuantizedWeight
from danlu.core.weight_gradients import Deferral, deferral_of, made_or_deferred
from danlu.models.grouped_mm import grouped_mm, grouped_weight_gradient, quantized_grouped_mm
from danlu.models.layer_spec import Activation, ClampedSwiGLU
from danlu.models.packed_weights import ACTIVE


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I], plus bias [O] -> [T, O] in x's dtype; gradients of weight and bias in theirs."""
    if (packed := ACTIVE.packed_weights) is not None:
        return packed.product(x, weight, bias)
    deferral = deferral_of(weight)
    if weight.dtype == x.dtype:
        narrow_bias = bias is None or bias.dtype == x.dtype
        if x.dtype == torch.bfloat16 and x.shape[:-1] == (1,) and x.device.type == "cpu" and narrow_bias:
            # Decoding one sequence. torch's general product takes up to twice as long over one bfloat16 row as this,
            # and gives the same bits ([32000, 512]: 2.5 ms against 1.5 ms; [2048, 2048]: 0.56 ms against 0.41 ms).
            y = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
            return y.unsqueeze(0)
        added = bias if narrow_bias else None
        y = F.linear(x, weight, added) if deferral is None else _Linear.apply(x, deferral.anchor, added, deferral)
        if narrow_bias:
            return y
    else:
        y = _Linear.apply(x, weight if deferral is None else deferral.anchor, None, deferral)
    return y if bias is None else y + bias.to(y.dtype)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I] times weight [O, I] -> [T, O], computed in float32 or wider, whatever their types are.

    The backward pass is left x in its own type.
    """
    if ACTIVE.packed_weights is not None or x.dtype in (torch.float32, torch.float64):
        return linear(x if x.dtype == torch.float64 else x.float(), weight)
    deferral = deferral_of(weight)
    y: Tensor = _WideLinear.apply(x, weight if deferral is None else deferral.anchor, deferral)
    return y


class _WideLinear(torch.autograd.Function):
    """`F.linear(x.float(), weight.float())` that keeps x and the weight in their own types."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferral: Deferral | None) -> Tensor:
        if deferral is not None:
            (weight,) = deferral.weights
        ctx.save_for_backward(x, weight)
        ctx.deferral = deferral
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            (grad_weight,) = made_or_deferred(ctx.deferral, partial(_weight_gradient, weight.dtype), grad, x)
        return grad_x, grad_weight, None


class _Linear(torch.autograd.Function):
    """`F.linear(x, weight.to(x.dtype), bias)` that keeps the weight as it is stored, and no narrow copy of it.

    With a deferral its anchor stands for the weight, and the queue computes the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral | None) -> Tensor:
        if deferral is not None:
            (weight,) = deferral.weights
        ctx.save_for_backward(x, weight)
        ctx.deferral = deferral
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            (grad_weight,) = made_or_deferred(ctx.deferral, partial(_weight_gradient, weight.dtype), grad, x)
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


def _weight_gradient(dtype: torch.dtype, grad: Tensor, x: Tensor) -> tuple[Tensor]:
    """grad [T, O], of the type of the product, and x [T, I] -> [O, I] in `dtype`."""
    return ((grad.t() @ x.to(grad.dtype)).to(dtype),)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows of several linear layers: x [N, I] times weight [G, O, I], plus bias [G, O] -> [N, O] in x's dtype.

    counts [G] int64: the first counts[0] rows belong to the first layer, and so on; N in all. Gradients of weight and
    bias are in their type, and zero for a layer without rows: its moments and its decay go on.
    """
    deferral = deferral_of(weight)
    y: Tensor = _GroupedLinear.apply(x, weight if deferral is None else deferral.anchor, counts, deferral)
    return with_bias_of_group(y, counts, bias)


def quantized_grouped_linear(
    x: Tensor, weight: StackedQuantizedWeight, counts: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`grouped_linear` over frozen weights that are dequantized for the product, and again for the backward pass; or
    that multiply rounded activations, or few rows of a rollout as they are stored."""
    if (y := weight.rounded_product(x, counts)) is None:
        packed = ACTIVE.packed_weights
        if packed is not None and not x.requires_grad:
            y = packed.quantized_grouped_product(x, weight, counts)
        else:
            y = _QuantizedGroupedLinear.apply(x, weight, counts)
    return with_bias_of_group(y, counts, bias)


def with_bias_of_group(y: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    """y [N, O] plus, of bias [G, O], each row's own."""
    if bias is None:
        return y
    layers = torch.repeat_interleave(counts, output_size=len(y))  # [N]
    return y + embedding(layers, bias, y.dtype)


class _GroupedLinear(torch.autograd.Function):
    """One product for each group of rows. Keeps the weight as it is stored, and may leave its gradient, as `_Linear`
    does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, deferral: Deferral | None) -> Tensor:
        if deferral is not None:
            (weight,) = deferral.weights
        ctx.save_for_backward(x, weight, counts)
        ctx.deferral = deferral
        return grouped_mm(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()  # grouped products refuse expanded gradients
        grad_x = grouped_mm(grad, weight, counts) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            make = partial(_grouped_weight_gradient, weight.dtype)
            (grad_weight,) = made_or_deferred(ctx.deferral, make, grad, x, counts)
        return grad_x, grad_weight, None, None


def _grouped_weight_gradient(dtype: torch.dtype, grad: Tensor, x: Tensor, counts: Tensor) -> tuple[Tensor]:
    """grad [N, O], x [N, I] and counts [G] -> [G, O, I] in `dtype`."""
    return (grouped_weight_gradient(grad, x, counts, dtype),)


class _QuantizedGroupedLinear(torch.autograd.Function):
    """Keeps neither x nor dequantized weights for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: StackedQuantizedWeight, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.weight = weight
        return quantized_grouped_mm(x, weight, counts, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        return quantized_grouped_mm(grad.contiguous(), ctx.weight, counts), None, None


def embedding(tokens: Tensor, weight: Tensor, dtype: torch.dtype, *, sparse_gradient: bool = False) -> Tensor:
    """Rows of weight [V, D] for tokens [T] -> [T, D] in `dtype`.

    sparse_gradient: the weight's gradient holds only the rows of `tokens` (a COO tensor), not all V.
    """
    half = weight.dtype in (torch.bfloat16, torch.float16)
    if half and weight.device.type == "cpu" and not sparse_gradient:
        return _HalfEmbedding.apply(tokens, weight).to(dtype)  # type: ignore[no-any-return]
    return F.embedding(tokens, weight, sparse=sparse_gradient).to(dtype)


class _HalfEmbedding(torch.autograd.Function):
    """`F.embedding`, with gradients of one token id summed in float32 and rounded once.

    On a CPU torch sums them in the type of the weight, where the gradient of a frequent token soon rounds away: in
    bfloat16, with 1000 token ids that follow Zipf's law, 1.6 % of the gradient of 4096 tokens and 19 % of that of
    65,536. CUDA's kernels sum in float32 already.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocab_size = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        sums = torch.ops.aten.embedding_dense_backward(grad.float(), tokens, ctx.vocab_size, -1, False)  # [V, D]
        return None, sums.to(grad.dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, shard: NormShard | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, statistics in float32 (arXiv:1910.07467).

    weight: None for rows that are normed and no more.
    offset: 1 for Gemma, where weights are stored as differences from one (and multiplied in float32). shard: where x
    and weight are a part of rows that are normed as a whole; the mean is over all of them then, forward and backward.
    """
    if not torch.is_grad_enabled():  # decoding makes dozens of these a token, and a Function costs as much as the norm
        return _normalise(x, weight, eps, offset, shard)[0]
    y: Tensor = _RmsNorm.apply(x, weight, eps, offset, shard)
    return y


def _normalise(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, shard: NormShard | None = None
) -> tuple[Tensor, Tensor]:
    """The normed rows in x's dtype, and one over the root of each row's mean square, [T, 1] float32 or wider."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    wide = x.float() if is_half else x
    squares = wide.square()
    if shard is None:
        mean = squares.mean(-1, keepdim=True)
    else:  # over whole rows, from this process's sums over its features
        mean = shard.group.sum(squares.sum(-1, keepdim=True) / shard.copies) / shard.width
    inverse = torch.rsqrt(mean + eps)
    normed = wide.mul_(inverse) if is_half else wide * inverse
    # Half-precision weights that are differences from one would lose most of their digits in half precision.
    if weight is None:
        y = normed
    else:
        scale = weight.to(wide.dtype) + offset if offset else weight
        y = normed * scale
    return y if y.dtype == x.dtype else y.to(x.dtype), inverse  # no cast for nothing: see `_SwiGLU`


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves x and a number a row; autograd over the formula saves three float32 copies of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, shard: NormShard | None
    ) -> Tensor:
        y, inverse = _normalise(x, weight, eps, offset, shard)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset, ctx.shard = offset, shard
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        scale = None if weight is None else weight.to(inverse.dtype)
        scale = scale + ctx.offset if scale is not None and ctx.offset else scale
        wide_grad = grad.to(inverse.dtype)
        normed = x.to(inverse.dtype) * inverse
        product = wide_grad * normed
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.reshape(-1, product.shape[-1]).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None, None
        # The derivative of x r(x) w by x: r (w g - n mean(w g n)), with n = x r the normed row.
        rows, shard = product.reshape(-1, product.shape[-1]), ctx.shard
        sums = rows.sum(-1) if scale is None else torch.mv(rows, scale)  # [T]
        # Each process that has a feature has a part of its gradient: all parts add up to the sum, which
        # goes into the squares of one copy.
        mean = sums / product.shape[-1] if shard is None else shard.group.sum(sums) / (shard.width * shard.copies)
        wide_grad = wide_grad.clone() if scale is None else wide_grad * scale  # it may be `grad`, and is written to
        grad_x = wide_grad.addcmul_(normed, mean.reshape(inverse.shape), value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis, computed in float32 (arXiv:1607.06450)."""
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return y


class _LayerNorm(torch.autograd.Function):
    """LayerNorm that saves x in its own type and two numbers a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide, scale, shift = _widened(x, weight, bias)
        y, mean, inverse = torch.native_layer_norm(wide, weight.shape, scale, shift, eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y if y.dtype == x.dtype else y.to(x.dtype)  # no cast for nothing: see `_SwiGLU`

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight, bias, mean, inverse = ctx.saved_tensors
        wide, scale, shift = _widened(x, weight, bias)
        needed = list(ctx.needs_input_grad[:3])
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad.to(wide.dtype), wide, weight.shape, mean, inverse, scale, shift, needed
        )
        return (
            grad_x.to(x.dtype) if needed[0] else None,
            grad_weight.to(weight.dtype) if needed[1] else None,
            grad_bias.to(bias.dtype) if needed[2] else None,
            None,
        )


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three in float32, or in the type of x where that is wider."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype)


def gated_mlp_activation(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv:2002.05202), gelu(gate) * up in either form of gelu, or gpt-oss' form."""
    if isinstance(kind, ClampedSwiGLU):
        clamped: Tensor = _ClampedSwiGLU.apply(gate, up, kind.alpha, kind.limit)
        return clamped
    if kind != "silu":
        return mlp_activation(gate, kind) * up
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    y: Tensor = _SwiGLU.apply(gate, up)
    return y


def mlp_activation(x: Tensor, kind: Activation) -> Tensor:
    """The activation of a feed-forward network without a gate: silu or either form of gelu (arXiv:1606.08415)."""
    assert not isinstance(kind, ClampedSwiGLU), "a clamped activation is of a gate and what it multiplies"
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, which saves gate and up only; silu(gate) is recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if torch.compiler.is_compiling():
            # torch 2.11 makes gradients zero where a compiled Function returns what its last operation was given: what
            # that changed in place, or cast to the type that it had. Compiled code has no second tensor either way.
            return F.silu(gate) * up
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        # silu is computed again: keeping it would take a third tensor as large as gate and up.
        grad_up = F.silu(gate).mul_(grad)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad_up


class _ClampedSwiGLU(torch.autograd.Function):
    """See `layer_spec.ClampedSwiGLU`. It saves gate and up only, where autograd would keep eight tensors as large."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        g = gate.clamp(max=limit)
        return up.clamp(-limit, limit).add_(1) * (g * (g * alpha).sigmoid())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        g = gate.clamp(max=limit)
        sigmoid = (g * alpha).sigmoid()
        slope = sigmoid * (1 + alpha * g * (1 - sigmoid))  # of g sigmoid(alpha g)
        grad_gate = (grad * slope * (up.clamp(-limit, limit) + 1)).masked_fill_(gate > limit, 0)
        grad_up = (grad * g * sigmoid).masked_fill_(up.abs() > limit, 0)
        return grad_gate, grad_up, None, None


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q [T, H, C] and k [T, K, C] by half-split rotary embedding (arXiv:2104.09864, in Hugging Face's order).

    cos, sin: [T, R] in q's dtype with both halves filled alike; R <= C: only the first R of each head are rotated.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R]
    if not torch.is_grad_enabled():  # decoding: half as many calls, and the same bits
        both = _rotate(torch.cat((q, k), dim=1), cos, sin)
        return both[:, : q.shape[1]], both[:, q.shape[1] :]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def halves_of_pairs(x: Tensor, width: int) -> Tensor:
    """x [T, H, C] with the first of each pair of neighbours among the first `width` features before all second ones.

    Half-split rotation then turns pairs of neighbours. Queries and keys are in this order alike, which no score depends
    on.
    """
    turned, rest = x[..., :width], x[..., width:]
    turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return turned if width == x.shape[-1] else torch.cat((turned, rest), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, C] as `apply_rope` rotates queries and keys; cos, sin: [T, R]."""
    return _rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
