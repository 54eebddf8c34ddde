"""The modules that hold a decoder's parameters: linear layers, the embedding, norms, the gated feed-forward network.

Parameters are uninitialised. Tensor parallelism, recomputation and adapters read what a layer's two sublayers,
attention and feed-forward network, declare (`Sublayer`), and know no class: another attention (latent), or another
feed-forward network (a mixture of experts) is a file with a class that has these declarations.

T packed tokens · D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from danlu.core.layer_types import (
    Attend,
    EmbeddingAdapter,
    GroupedAdapter,
    LayerCache,
    LinearAdapter,
    LinearArithmetic,
    NormShard,
    QuantizedWeight,
    Recomputed,
    RowCodes,
    StackedQuantizedWeight,
)
from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Activation, Dense, NormKind
from danlu.models.packed_weights import ACTIVE, takes_few_rows
from danlu.models.rope import Rotation
from danlu.models.tensor_cut import TensorCut

RecomputePoints = Mapping[Literal["elementwise", "selective"], Sequence[str]]
"""Kind of recomputation -> the functions between products, from the module on ("q_norm.forward"), with outputs that are
dropped and computed again in the backward pass. A path may lead to a module that is None."""

BoundaryOp = Callable[[Tensor], Tensor]
"""An operation on activations that enter or leave the part of a model that is cut over processes."""


def identity(x: Tensor) -> Tensor:
    """x: at a boundary that nothing is cut at."""
    return x


class Sublayer(Protocol):
    """Attention or feed-forward network as parallelism, recomputation and adapters see it; an `nn.Module`, too."""

    recompute_points: ClassVar[RecomputePoints]

    @property
    def tensor_cut(self) -> TensorCut:
        """How its parameters may be cut over processes."""
        ...


class AttentionSublayer(Sublayer, Protocol):
    """x [T, D]; rotations: of each of the model's rotary embeddings, in x's dtype -> [T, D]."""

    @property
    def cache(self) -> LayerCache: ...

    def __call__(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor: ...


class FeedForwardSublayer(Sublayer, Protocol):
    """x [T, D] -> [T, D], token by token."""

    def __call__(self, x: Tensor) -> Tensor: ...


class _Weights(nn.Module):
    """The weight and bias of a linear layer, or of several layers in one tensor, uninitialised.

    Three slots are filled from outside: `quantized` holds frozen weights in few bits, in place of `weight`; `adapter`
    takes over the whole product; `arithmetic` says how products are computed where it is not in the type of
    activations. Cut over processes it is a smaller layer, and `shape` is that of the local part.
    """

    quantized: Any
    adapter: Any
    arithmetic: LinearArithmetic | None
    bias: Tensor | None

    def __init__(self, *stacked: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(*stacked, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(*stacked, out_features)) if bias else None
        self.register_module("quantized", None)
        self.register_module("adapter", None)
        self.arithmetic = None
        self.adds_bias = True
        """False where the outputs are a part of a sum over processes, to which another one adds the bias."""

    @property
    def added_bias(self) -> Tensor | None:
        """[.., out]: zeros where another process adds it, which still lead back to the bias: all have a gradient."""
        return self.bias if self.bias is None or self.adds_bias else self.bias * 0

    def store(self, quantized: Any) -> None:
        """Replaces the weights by quantized ones."""
        self.weight = None
        self.quantized = quantized

    @property
    def stored_weight(self) -> Tensor:
        """[.., out, in]: the weights themselves, of layers that are not quantized."""
        assert self.weight is not None, "the weights are quantized"
        return self.weight

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """[.., out, in]: the weights themselves where they are stored in that type, else a new tensor."""
        if self.weight is not None:
            return self.weight.to(dtype)
        dense: Tensor = self._stored.dense(dtype)
        return dense

    @property
    def own_arithmetic(self) -> LinearArithmetic | None:
        """The arithmetic of products now; None for that of the type of activations, as rollouts have it unless it
        rounds weights."""
        arithmetic = None if self.weight is None else self.arithmetic
        if arithmetic is None or ACTIVE.packed_weights is None:
            return arithmetic
        return None if arithmetic.rounding is None else arithmetic

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        """[.., out, in]: the weights as products have them, without an adapter: those that are trained for a format of
        few bits rounded to it."""
        arithmetic = self.own_arithmetic
        if arithmetic is None or arithmetic.rounding is None:
            return self.dense_weight(dtype)
        return arithmetic.rounding.numbers(self.stored_weight, dtype)

    @property
    def _stored(self) -> Any:
        assert self.quantized is not None, "a linear layer has a weight or a quantized one"
        return self.quantized


class Linear(_Weights):
    """x [T, in] -> [T, out] in x's dtype. Parameters are uninitialised: load or `initialize` them."""

    quantized: QuantizedWeight | None
    adapter: LinearAdapter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features=in_features, out_features=out_features, bias=bias)

    def tie(self, embedding: nn.Module) -> None:
        """Shares the weight of an embedding."""
        self.register_parameter("weight", embedding.get_parameter("weight"))

    @contextmanager
    def weight_in_workspace(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """[out, in], valid until the block ends; a quantized weight is dequantized into the shared workspace."""
        if self.weight is not None:
            yield self.weight.to(dtype)
            return
        with self._stored.in_workspace(dtype) as weight:
            yield weight

    def scaled_rows(self, matrix: Tensor, factors: Tensor) -> Tensor:
        """A matrix of `weight_in_workspace`, each row times a factor [out]; in place if the matrix is a copy."""
        column = factors.to(matrix.dtype).unsqueeze(1)
        return matrix.mul_(column) if self.weight is None else matrix * column

    def base(self, x: Tensor) -> Tensor:
        """The product without the adapter."""
        if (arithmetic := self.own_arithmetic) is not None:
            (y,) = _linears(x, (self,), arithmetic)
            return y
        packed, bias = ACTIVE.packed_weights, self.added_bias
        if self.weight is not None:
            if packed is not None:
                return packed.product(x, self.weight, bias, packed.encoder_of(self))
            return ops.linear(x, self.weight, bias)
        y = self._stored.product(x) if packed is None else packed.quantized_product(x, self._stored)
        return y if bias is None else y + bias.to(y.dtype)

    def multiplies_codes(self, x: Tensor) -> bool:
        """Whether `base` multiplies x [T, in] with codes as they are stored, if there is a kernel that does."""
        return self.weight is None and ACTIVE.packed_weights is not None and takes_few_rows(x)

    def forward(self, x: Tensor, recomputed: Recomputed | None = None) -> Tensor:
        return self.base(x) if self.adapter is None else self.adapter(x, self, recomputed)

    def extra_repr(self) -> str:
        return f"{self.shape[1]} -> {self.shape[0]}"


def forward_shared(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Several linear layers over one x; an adapter on any of them may share work among them."""
    adapter = next((linear.adapter for linear in linears if linear.adapter is not None), None)
    if adapter is not None:
        return adapter.forward_shared(x, linears)
    if any(linear.own_arithmetic is not None for linear in linears):
        return _by_arithmetic(x, linears)
    packed = ACTIVE.packed_weights
    weights = [linear.weight for linear in linears if linear.weight is not None]
    if packed is not None and len(weights) == len(linears):
        encoder, *others = (packed.encoder_of(linear) for linear in linears)
        if all(other is encoder for other in others):
            return packed.products(x, weights, [linear.added_bias for linear in linears], encoder)
    if packed is not None and all(linear.multiplies_codes(x) for linear in linears):
        biases = [linear.added_bias for linear in linears]
        return packed.quantized_products(x, [linear._stored for linear in linears], biases)
    return tuple(linear(x) for linear in linears)


def _by_arithmetic(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """`forward_shared` of layers without adapters, of which some may have no arithmetic of their own."""
    outputs: dict[Linear, Tensor] = {}
    for arithmetic in dict.fromkeys(linear.own_arithmetic for linear in linears):
        group = [linear for linear in linears if linear.own_arithmetic is arithmetic]
        products = [linear(x) for linear in group] if arithmetic is None else _linears(x, group, arithmetic)
        outputs.update(zip(group, products, strict=True))
    return tuple(outputs[linear] for linear in linears)


def _linears(
    x: Tensor,
    linears: Sequence[_Weights],
    arithmetic: LinearArithmetic,
    counts: Tensor | None = None,
    kept: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:
    """The products of layers that share their input, without their adapters, by an arithmetic of their own."""
    from danlu.models import linear_arithmetic

    weights = [linear.stored_weight for linear in linears]
    return linear_arithmetic.linears(x, weights, [linear.added_bias for linear in linears], arithmetic, counts, kept)


class GroupedLinear(_Weights):
    """Linear layers of one shape, as those of experts: rows [N, in], those of each layer together -> [N, out].

    Parameters are those of all layers in one tensor, uninitialised: load or `initialize` them.
    """

    quantized: StackedQuantizedWeight | None
    adapter: GroupedAdapter | None

    def __init__(self, groups: int, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(groups, in_features=in_features, out_features=out_features, bias=bias)

    def base(self, x: Tensor, counts: Tensor) -> Tensor:
        """The product without the adapter."""
        if (arithmetic := self.own_arithmetic) is not None:
            (y,) = _linears(x, (self,), arithmetic, counts)
            return y
        if self.weight is not None:
            packed = ACTIVE.packed_weights
            if packed is not None and (encoder := packed.encoder_of(self)) is not None:
                y = packed.grouped_product(x, self.weight, counts, encoder)
                return ops.with_bias_of_group(y, counts, self.added_bias)
            return ops.grouped_linear(x, self.weight, counts, self.added_bias)
        return ops.quantized_grouped_linear(x, self._stored, counts, self.added_bias)

    def product(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """x [N, I'] times other matrices [groups, O', I'] of these layers -> [N, O'] in x's dtype."""
        return ops.grouped_linear(x, weight, counts)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [N, in]; counts [groups] int64, rows of each layer, N in all -> [N, out] in x's dtype."""
        return self.base(x, counts) if self.adapter is None else self.adapter(x, counts, self)

    def extra_repr(self) -> str:
        count = self._stored.count if self.weight is None else len(self.weight)
        return f"{count} of {self.shape[1]} -> {self.shape[0]}"


def grouped_forward_shared(
    x: Tensor, counts: Tensor, *linears: GroupedLinear, kept: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """Several stacked layers over the same rows x [N, in]; counts [groups], rows of each. kept: of rows that have come
    as codes (`row_codes`)."""
    arithmetic = linears[0].own_arithmetic
    if arithmetic is None or any(linear.adapter is not None for linear in linears):
        assert not kept, "such layers are not sent codes"
        return tuple(linear(x, counts) for linear in linears)
    return _linears(x, linears, arithmetic, counts, kept)


def row_codes(*linears: GroupedLinear) -> RowCodes | None:
    """Returns the codes as which rows of stacked layers, or gradients of their outputs, travel between processes; None
    where they travel in the type of activations, which adapters read and sum."""
    arithmetic = linears[0].own_arithmetic
    if arithmetic is None or any(linear.adapter is not None for linear in linears):
        return None
    return arithmetic.row_codes


def gated_linear(
    gate: Tensor, up: Tensor, activation: Activation, down: Linear | GroupedLinear, counts: Tensor | None = None
) -> Tensor | None:
    """The product of activation(gate) * up, [T, F] each, with a layer that keeps its inputs in few bits -> [T, out];
    None for other layers. counts [groups]: of stacked layers, rows of each."""
    arithmetic = down.own_arithmetic
    if arithmetic is None or not arithmetic.keeps_codes or down.adapter is not None:
        return None
    from danlu.models import linear_arithmetic

    weight, bias = down.stored_weight, down.added_bias
    return linear_arithmetic.gated_linear(gate, up, activation, weight, bias, arithmetic, counts)


class RMSNorm(nn.Module):
    """x [.., width] -> x / sqrt(mean(x^2) + eps) * (weight + offset), in x's dtype.

    eps, offset: the model's by default; its offset is 1 in Gemma. Where its features are cut over processes, `shard`
    says so: the mean is over those of all processes.
    """

    def __init__(
        self, width: int, config: ModelConfig, *, eps: float | None = None, offset: float | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = config.rms_norm_eps if eps is None else eps
        self.offset = config.norm_offset if offset is None else offset
        self.shard: NormShard | None = None

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, offset=self.offset, shard=self.shard)


class LayerNorm(nn.Module):
    """x [.., width] -> (x - mean(x)) / sqrt(var(x) + eps) * weight, plus a bias if it has one, in x's dtype."""

    bias: Tensor | None

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


def norm_of(config: ModelConfig, kind: NormKind) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, of the kind that a layer has."""
    if kind == "rms":
        return RMSNorm(config.hidden_size, config)
    return LayerNorm(config.hidden_size, config.rms_norm_eps, bias=kind == "layer-bias")


class LayerScalar(nn.Module):
    """x times a number, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class Embedding(nn.Module):
    """tokens [T] -> [T, D], D the model's width unless another one is given. The slot `adapter` takes over the look-up,
    also of tokens past the vocabulary.

    Where the vocabulary is cut over processes, tokens with rows on another process give zeros, and `leave` sums over
    the processes.
    """

    adapter: EmbeddingAdapter | None
    weight: Tensor

    def __init__(self, config: ModelConfig, *, width: int | None = None, multiplier: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_rows, config.hidden_size if width is None else width))
        self.register_module("adapter", None)
        self.multiplier = config.embedding_multiplier if multiplier is None else multiplier
        self.rows = config.vocab_rows
        """Rows on all processes together."""
        self.vocab_start = 0
        """The first token id with a row in `weight`."""
        self.leave: BoundaryOp = identity
        self.sparse_gradient = False
        """Whether the weight's gradient is a sparse tensor of the rows of tokens that occur: see `ops.embedding`."""

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.base(tokens, dtype) if self.adapter is None else self.adapter(tokens, dtype, self)  # [T, D]
        x = self.leave(x)
        if self.multiplier == 1.0:
            return x
        # Gemma was trained with the multiplier rounded to the type of activations: in bfloat16 sqrt(3072) is 55.5.
        return x * torch.tensor(self.multiplier, dtype=dtype, device=x.device)

    def base(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of the tokens, without adapter and multiplier; zeros for rows that another process has."""
        rows, elsewhere = self.local_rows(tokens)
        x = ops.embedding(rows, self.weight, dtype, sparse_gradient=self.sparse_gradient)
        return x if elsewhere is None else x.masked_fill(elsewhere.unsqueeze(1), 0)

    def local_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of `weight` [T] for tokens [T], and a mask [T] of those with a row on another process, or
        None.

        A token outside of the vocabulary stays outside on the process with the nearest row: an error of the look-up.
        """
        end = self.vocab_start + self.weight.shape[0]
        elsewhere = None
        if self.vocab_start > 0:
            elsewhere = tokens < self.vocab_start
        if end < self.rows:
            elsewhere = tokens >= end if elsewhere is None else elsewhere | (tokens >= end)
        if elsewhere is None:
            return tokens, None
        return (tokens - self.vocab_start).masked_fill(elsewhere, 0), elsewhere


class MLP(nn.Module):
    """x [T, D] -> down(activation(gate(x)) * up(x)) [T, D], a gated linear unit (arXiv:2002.05202); without a gate,
    down(activation(up(x))).
    """

    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("gated_activation",),
        "selective": ("gated_activation",),
    }

    def __init__(self, config: ModelConfig, spec: Dense) -> None:
        super().__init__()
        width, mlp = config.hidden_size, spec.intermediate_size
        self.gate_proj = Linear(width, mlp, bias=spec.bias) if spec.gated else None
        self.up_proj = Linear(width, mlp, bias=spec.bias)
        self.down_proj = Linear(mlp, width, bias=spec.bias)
        self.activation = spec.activation
        self.tensor_cut = spec.tensor_cut

    def forward(self, x: Tensor) -> Tensor:
        gates = () if self.gate_proj is None else (self.gate_proj,)
        products = forward_shared(x, *gates, self.up_proj)  # [T, F] each
        if len(products) == 2 and (kept := gated_linear(*products, self.activation, self.down_proj)) is not None:
            return kept
        activated = self.gated_activation(*products)
        out: Tensor = self.down_proj(activated, Recomputed(self.gated_activation, products))
        return out

    def gated_activation(self, *products: Tensor) -> Tensor:
        """The activation of gate [T, F] times up [T, F], or of up alone."""
        if len(products) == 1:
            return ops.mlp_activation(products[0], self.activation)
        gate, up = products
        return ops.gated_mlp_activation(gate, up, self.activation)
