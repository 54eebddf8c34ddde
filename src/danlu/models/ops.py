"""The decoder's arithmetic: where float32 weights meet activations of a narrower type.

Weights stay float32 while activations are bfloat16 or float16. A product casts its weight on the fly, in the forward
and again in the backward pass, and hands back a float32 gradient: no second copy of the weights is held (a pass over
1024 tokens costs about 1 % more for it), and the optimizer works on full-precision masters without extra steps.

T tokens · I in features · O out features · D model width · H query heads · K key/value heads · C head width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.layer_types import NormShard
from danlu.models.layer_spec import Activation, ClampedSwiGLU
from danlu.models.packed_weights import active_packed_weights


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times weight [O, I], plus bias [O] -> [T, O] in x's dtype; gradients of weight and bias in theirs."""
    if (packed := active_packed_weights()) is not None:
        return packed.product(x, weight, bias)
    if weight.dtype == x.dtype:
        narrow_bias = bias is None or bias.dtype == x.dtype
        if x.dtype == torch.bfloat16 and x.shape[:-1] == (1,) and x.device.type == "cpu" and narrow_bias:
            # Decoding one sequence. torch's general product takes up to twice as long over one bfloat16 row as this,
            # and gives the same bits ([32000, 512]: 2.5 ms against 1.5 ms; [2048, 2048]: 0.56 ms against 0.41 ms).
            y = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
            return y.unsqueeze(0)
        if narrow_bias:
            return F.linear(x, weight, bias)
        y = F.linear(x, weight)
    else:
        y = _CastLinear.apply(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


class _CastLinear(torch.autograd.Function):
    """`F.linear(x, weight.to(x.dtype))` that keeps the float32 weight, not its narrow copy, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.t() @ x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows of several linear layers: x [N, I] times weight [G, O, I], plus bias [G, O] -> [N, O] in x's dtype.

    counts [G] int64: the first counts[0] rows are of the first layer, and so on; N in all. Gradients of weight and bias
    are in their type, and zero for a layer without rows: its moments and its decay go on.
    """
    y: Tensor = _GroupedLinear.apply(x, weight, counts)
    if bias is None:
        return y
    layers = torch.repeat_interleave(counts, output_size=len(x))  # [N]
    return y + embedding(layers, bias, y.dtype)


class _GroupedLinear(torch.autograd.Function):
    """One product for each group of rows. Keeps the float32 weight, not its narrow copy, as `_CastLinear` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _grouped_mm(x, weight.to(x.dtype).transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()  # grouped_mm refuses expanded gradients
        grad_x = _grouped_mm(grad, weight.to(grad.dtype), counts) if ctx.needs_input_grad[0] else None
        grad_weight = _grouped_mm(grad.t(), x, counts).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


_GROUPED_MM_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUPED_MM_BYTES = 16  # that its strides have to be multiples of


def _grouped_mm(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """left [N, K] by groups of rows @ right [G, K, M] -> [N, M]; left [K, N] @ right [N, M], by groups of what is
    contracted -> [G, K, M].

    By torch's grouped product where it takes such tensors, else group by group. On a CPU both give the same bits, and
    the first takes 0.7 to 1.0 of the time (one thread of a Sapphire Rapids; 32 and 128 groups, 4096 rows, float32 and
    bfloat16); on a GPU it does not wait for the counts.
    """
    fits = left.dtype in _GROUPED_MM_TYPES and all(_has_aligned_rows(each) for each in (left, right))
    if fits:
        return F.grouped_mm(left, right, offs=counts.cumsum(0, dtype=torch.int32))
    sizes = counts.tolist()
    if right.ndim == 3:
        return torch.cat([rows @ matrix for rows, matrix in zip(left.split(sizes), right.unbind(), strict=True)])
    groups = zip(left.split(sizes, dim=1), right.split(sizes), strict=True)
    return torch.stack([columns @ rows for columns, rows in groups])


def _has_aligned_rows(matrices: Tensor) -> bool:
    """Whether the rows, or columns, of matrices begin at multiples of the bytes that a grouped product asks for."""
    strides = matrices.stride()[-2:]
    step = max(strides) if 1 in strides else 1
    return step * matrices.element_size() % _GROUPED_MM_BYTES == 0


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

    On a CPU torch sums them in the type of the weight, where what a frequent token gets soon rounds away: in bfloat16,
    with 1000 token ids that follow Zipf's law, 1.6 % of the gradient of 4096 tokens and 19 % of that of 65,536. CUDA's
    kernels sum in float32 already.
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, shard: NormShard | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, statistics in float32 (arXiv:1910.07467).

    offset: 1 for Gemma, whose weights are stored as differences from one (and multiplied in float32). shard: where x
    and weight are a part of rows that are normed as a whole; the mean is over all of them then, forward and backward.
    """
    if not torch.is_grad_enabled():  # decoding makes dozens of these a token, and a Function costs as much as the norm
        return _normalise(x, weight, eps, offset, shard)[0]
    y: Tensor = _RmsNorm.apply(x, weight, eps, offset, shard)
    return y


def _normalise(
    x: Tensor, weight: Tensor, eps: float, offset: float, shard: NormShard | None = None
) -> tuple[Tensor, Tensor]:
    """The normed rows in x's dtype, and one over the root of each row's mean square, [T, 1] float32 or wider."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    squares = wide.square()
    mean = squares.mean(-1, keepdim=True) if shard is None else _mean_over_shards(squares.sum(-1, keepdim=True), shard)
    inverse = torch.rsqrt(mean + eps)
    normed = wide * inverse
    # Half-precision weights that are differences from one would lose most of their digits in half precision.
    scale = weight.to(wide.dtype) + offset if offset else weight
    y = normed * scale
    return y if y.dtype == x.dtype else y.to(x.dtype), inverse  # no cast for nothing: see `_SwiGLU`


def _mean_over_shards(sums: Tensor, shard: NormShard) -> Tensor:
    """The mean over whole rows, from this process's sums over its features."""
    return shard.group.sum(sums / shard.copies) / shard.width


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves x and a number a row; autograd over the formula saves three float32 copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, shard: NormShard | None) -> Tensor:
        y, inverse = _normalise(x, weight, eps, offset, shard)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset, ctx.shard = offset, shard
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        scale = weight.to(inverse.dtype)
        scale = scale + ctx.offset if ctx.offset else scale
        wide_grad = grad.to(inverse.dtype)
        normed = x.to(inverse.dtype) * inverse
        product = wide_grad * normed
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.reshape(-1, product.shape[-1]).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None, None
        # The derivative of x r(x) w by x: r (w g - n mean(w g n)), with n = x r the normed row.
        sums, shard = torch.mv(product.reshape(-1, product.shape[-1]), scale), ctx.shard  # [T]
        # Of features that several processes have, each has a part of the gradient: all parts add up to the sum, which
        # goes into the squares of one copy.
        mean = sums / product.shape[-1] if shard is None else shard.group.sum(sums) / (shard.width * shard.copies)
        wide_grad = wide_grad * scale
        grad_x = wide_grad.addcmul_(normed, mean.reshape(inverse.shape), value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None, None, None


def gated_mlp_activation(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv:2002.05202), gelu(gate) * up with the tanh form of gelu, or gpt-oss' form."""
    if isinstance(kind, ClampedSwiGLU):
        clamped: Tensor = _ClampedSwiGLU.apply(gate, up, kind.alpha, kind.limit)
        return clamped
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    y: Tensor = _SwiGLU.apply(gate, up)
    return y


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, C] as `apply_rope` rotates queries and keys; cos, sin: [T, R]."""
    return _rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
