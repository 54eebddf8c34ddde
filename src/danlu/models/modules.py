"""The modules that hold a decoder's parameters: linear layers, the embedding and norms. Parameters are uninitialised.

T packed tokens · D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from danlu.core.layer_types import (
    EmbeddingAdapter,
    GroupedAdapter,
    LinearAdapter,
    NormShard,
    QuantizedWeight,
    Recomputed,
    StackedQuantizedWeight,
)
from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.packed_weights import active_packed_weights
from danlu.models.sublayer import BoundaryOp, identity


class Linear(nn.Module):
    """x [T, in] -> [T, out] in x's dtype. Parameters are uninitialised: load or `initialize` them.

    Two slots are filled from outside: `quantized` holds a frozen weight in few bits, in place of `weight`; `adapter`
    takes over the whole product. Cut over processes it is a smaller layer, and `shape` is that of the local part.
    """

    quantized: QuantizedWeight | None
    adapter: LinearAdapter | None
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_module("quantized", None)
        self.register_module("adapter", None)
        self.adds_bias = True
        """False where the outputs are a part of a sum over processes, to which another one adds the bias."""

    @property
    def added_bias(self) -> Tensor | None:
        """[out]: zeros where another process adds it, which still lead back to the bias: all have a gradient."""
        return self.bias if self.bias is None or self.adds_bias else self.bias * 0

    def store(self, quantized: QuantizedWeight) -> None:
        """Replaces the weight by a quantized one."""
        self.weight = None
        self.quantized = quantized

    def tie(self, embedding: nn.Module) -> None:
        """Shares the weight of an embedding."""
        self.register_parameter("weight", embedding.get_parameter("weight"))

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: the weight itself where it is stored in that type, else a new tensor."""
        if self.weight is not None:
            return self.weight.to(dtype)
        assert self.quantized is not None, "a linear layer has a weight or a quantized one"
        return self.quantized.dense(dtype)

    @contextmanager
    def weight_in_workspace(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """[out, in], valid until the block ends; a quantized weight is dequantized into the shared workspace."""
        if self.weight is not None:
            yield self.weight.to(dtype)
            return
        assert self.quantized is not None, "a linear layer has a weight or a quantized one"
        with self.quantized.in_workspace(dtype) as weight:
            yield weight

    def scaled_rows(self, matrix: Tensor, factors: Tensor) -> Tensor:
        """A matrix of `weight_in_workspace`, each row times a factor [out]; in place if the matrix is a copy."""
        column = factors.to(matrix.dtype).unsqueeze(1)
        return matrix.mul_(column) if self.weight is None else matrix * column

    def base(self, x: Tensor) -> Tensor:
        """The product without the adapter."""
        if self.weight is not None:
            return ops.linear(x, self.weight, self.added_bias)
        assert self.quantized is not None, "a linear layer has a weight or a quantized one"
        y, bias = self.quantized.product(x), self.added_bias
        return y if bias is None else y + bias.to(y.dtype)

    def forward(self, x: Tensor, recomputed: Recomputed | None = None) -> Tensor:
        return self.base(x) if self.adapter is None else self.adapter(x, self, recomputed)

    def extra_repr(self) -> str:
        return f"{self.shape[1]} -> {self.shape[0]}"


def forward_shared(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Several linear layers over one x; an adapter on any of them may share work among them."""
    adapter = next((linear.adapter for linear in linears if linear.adapter is not None), None)
    if adapter is not None:
        return adapter.forward_shared(x, linears)
    packed = active_packed_weights()
    weights = [linear.weight for linear in linears if linear.weight is not None]
    if packed is not None and len(weights) == len(linears):
        return packed.products(x, weights, [linear.added_bias for linear in linears])
    return tuple(linear(x) for linear in linears)


class GroupedLinear(nn.Module):
    """Linear layers of one shape, as those of experts: rows [N, in], those of each layer together -> [N, out].

    Parameters are those of all layers in one tensor, uninitialised: load or `initialize` them. The slot `quantized`
    holds frozen weights in few bits, in place of `weight`; the slot `adapter` takes over the product.
    """

    quantized: StackedQuantizedWeight | None
    adapter: GroupedAdapter | None
    bias: Tensor | None

    def __init__(self, groups: int, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(groups, out_features)) if bias else None
        self.register_module("quantized", None)
        self.register_module("adapter", None)
        self.adds_bias = True
        """False where the outputs are a part of a sum over processes, to which another one adds the bias."""

    @property
    def added_bias(self) -> Tensor | None:
        """[groups, out]: zeros where another process adds it, which still lead back to the bias."""
        return self.bias if self.bias is None or self.adds_bias else self.bias * 0

    def store(self, quantized: StackedQuantizedWeight) -> None:
        """Replaces the weights by quantized ones."""
        self.weight = None
        self.quantized = quantized

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """[groups, out, in]: the weights themselves where they are stored in that type, else a new tensor."""
        if self.weight is not None:
            return self.weight.to(dtype)
        return self._stored().dense(dtype)

    def base(self, x: Tensor, counts: Tensor) -> Tensor:
        """The product without the adapter."""
        if self.weight is not None:
            return ops.grouped_linear(x, self.weight, counts, self.added_bias)
        return ops.quantized_grouped_linear(x, self._stored(), counts, self.added_bias)

    def _stored(self) -> StackedQuantizedWeight:
        assert self.quantized is not None, "grouped linear layers have weights or quantized ones"
        return self.quantized

    def product(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """x [N, I'] times other matrices [groups, O', I'] of these layers -> [N, O'] in x's dtype."""
        return ops.grouped_linear(x, weight, counts)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [N, in]; counts [groups] int64, rows of each layer, N in all -> [N, out] in x's dtype."""
        return self.base(x, counts) if self.adapter is None else self.adapter(x, counts, self)

    def extra_repr(self) -> str:
        count = self._stored().count if self.weight is None else len(self.weight)
        return f"{count} of {self.shape[1]} -> {self.shape[0]}"


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


class Embedding(nn.Module):
    """tokens [T] -> [T, D]. The slot `adapter` takes over the look-up, also of tokens past the vocabulary.

    Where the vocabulary is cut over processes, tokens with rows on another process give zeros, and `leave` sums over
    the processes.
    """

    adapter: EmbeddingAdapter | None
    weight: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.register_module("adapter", None)
        self.multiplier = config.embedding_multiplier
        self.vocab_size = config.vocab_size
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
        if end < self.vocab_size:
            elsewhere = tokens >= end if elsewhere is None else elsewhere | (tokens >= end)
        if elsewhere is None:
            return tokens, None
        return (tokens - self.vocab_start).masked_fill(elsewhere, 0), elsewhere
