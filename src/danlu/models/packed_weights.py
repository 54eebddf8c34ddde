"""Weights packed for the products of a rollout: a row for each growing sequence, and the same weights all the time.

Decoding is bound by how fast weights are read, and on a CPU by the order they lie in: oneDNN reads copies that it has
ordered itself two to four times as fast as MKL reads a matrix. Two threads of a Zen 4, in us, unpacked/packed:

    float32   [4096, 256]   1 row 108/51   8 rows 231/98    64 rows 1313/620   512 rows 7137/5180
    bfloat16  [32000, 512]  1 row 1934/631  8 rows 2388/1126  64 rows 6540/5320

That is another order of the same sums than training's, so products are made this way only where `PackedWeights` are
active, which the rollout engine's fast numerics see to. Layers that have an encoder there are multiplied with copies
in few bits (`rollout.precision`).

M rows · I in features · O out features
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.layer_types import FewRowProduct, QuantizedWeight, StackedQuantizedWeight
from danlu.models.grouped_mm import quantized_grouped_mm

# Which order oneDNN chooses hangs on the rows that it expects; this one serves from 2 to 512 rows well (measured).
EXPECTED_ROWS = 32
FEW_ROWS = 16
"""The most rows for which matrices in few bits are multiplied as they are stored; more are worth a dense matrix."""
# One float32 row: a call of oneDNN takes 17 us at least, in which MKL has read so large a weight.
LEAST_OF_ONE_ROW = 1 << 18


WeightEncoder = Callable[[Sequence[Tensor]], Callable[[Tensor], Tensor]]
"""Encodes weights [O, I] in the type of activations: returns the product of x [M, I] with them, one below the other ->
[M, O] in x's dtype."""


@dataclass(frozen=True)
class Product:
    """A copy of the weights of layers that share one x, one below the other, in the type of activations or encoded."""

    weights: tuple[Tensor, ...]  # with the biases kept, so that their ids are no others'
    biases: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    """The version counters of weights and biases."""
    dtype: torch.dtype
    """The type of activations."""
    multiply: Callable[[Tensor], Tensor]
    """x [M, I] -> [M, O], with the bias where nothing is encoded."""
    bias: Tensor | None
    """[O]"""
    encoder: WeightEncoder | None = None

    def follows(
        self,
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor | None, ...],
        dtype: torch.dtype,
        encoder: WeightEncoder | None = None,
    ) -> bool:
        """Whether the product still belongs to the present weights and biases."""
        if self.dtype != dtype or self.encoder is not encoder or not all(map(operator.is_, self.biases, biases)):
            return False
        sources = weights if self.bias is None else (*weights, *self.biases)
        return self.versions == tuple([source._version for source in sources if source is not None])

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [M, I] -> [M, O], plus a residual [M, O], which is left as it is."""
        weight, *more = self.weights
        is_plain = self.encoder is None and self.bias is None and weight.dtype == x.dtype
        if not more and is_plain and _is_read_at_once(x, weight.numel()):
            return torch.addmm(residual, x, weight.t())
        return self(x).add_(residual)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O]."""
        y = self.multiply(x)
        return y if self.encoder is None or self.bias is None else y.add_(self.bias)


@dataclass(frozen=True)
class QuantizedProduct:
    """The product with frozen matrices in few bits of layers that share one x, one below the other."""

    packed_weights: PackedWeights
    weights: tuple[QuantizedWeight, ...]
    bias: Tensor | None
    """[O of all], in the type of activations."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [M, I] -> [M, O of all], plus a residual of that size, which is left as it is."""
        return self(x).add_(residual)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O of all], a new tensor."""
        y = self.packed_weights.quantized_product(x, *self.weights)
        return y if self.bias is None else y.add_(self.bias)


class PackedWeights:
    """Makes the products of linear layers in a thread while it is active, with copies of their weights.

    A copy is used as long as its weights do not change. Weights of another type than activations, such as a trainer's
    float32 ones, are cast once and not for every token.

    limit_bytes: the memory for copies of weights that could be multiplied as they are; weights beyond it are multiplied
    as they are. encoder: of the weights of `encoded_layers`.
    """

    def __init__(
        self, limit_bytes: int, encoder: WeightEncoder | None = None, encoded_layers: Iterable[nn.Module] = ()
    ) -> None:
        self.limit_bytes = limit_bytes
        self._encoder, self._encoded_layers = encoder, frozenset(encoded_layers)
        self._taken_bytes = self._few_row_bytes = 0
        self._copies: dict[tuple[int, ...], Product] = {}  # by the ids of the weights
        self._stacked_copies: dict[int, _StackedCopy] = {}  # of encoded experts
        self._few_row_products: dict[tuple[tuple[QuantizedWeight, ...], bool], FewRowProduct | None] = {}
        self._stacked_few_row_products: dict[StackedQuantizedWeight, dict[tuple[int, bool], FewRowProduct | None]] = {}

    @property
    def copies(self) -> int:
        """The number of copies."""
        return len(self._copies)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which `ops.linear` asks `product`, and layers that share their input ask `products`."""
        before = ACTIVE.packed_weights
        ACTIVE.packed_weights = self
        try:
            yield
        finally:
            ACTIVE.packed_weights = before

    def encoder_of(self, layer: nn.Module) -> WeightEncoder | None:
        """The encoder of the weights of a layer; None where they are multiplied in the type of activations."""
        return self._encoder if layer in self._encoded_layers else None

    def clear(self) -> None:
        """Gives the memory of copies back."""
        self.clear_trained()
        self._few_row_products, self._stacked_few_row_products, self._few_row_bytes = {}, {}, 0

    def clear_trained(self) -> None:
        """Drops the copies of weights that may change, which weights in few bits do not."""
        self._copies, self._stacked_copies, self._taken_bytes = {}, {}, 0

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, encoder: WeightEncoder | None = None) -> Tensor:
        """x [.., I] @ weight [O, I].T, plus bias [O] -> [.., O] in x's dtype."""
        if encoder is None and _is_read_at_once(x, weight.numel()) and weight.dtype == x.dtype:
            return F.linear(x, weight, bias)
        rows = x.flatten(0, -2) if x.ndim > 2 else x
        copy = self._copy_of(rows, (weight,), (bias,), encoder)
        if copy is None:
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        y = copy(rows)
        return y.unflatten(0, x.shape[:-1]) if x.ndim > 2 else y

    def products(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        encoder: WeightEncoder | None = None,
    ) -> tuple[Tensor, ...]:
        """The products of x [M, I] with several weights [O, I] -> [M, O] of each, views of one tensor where they are
        made as one."""
        elements = sum([weight.numel() for weight in weights])
        if encoder is None and _is_read_at_once(x, elements) and all(weight.dtype == x.dtype for weight in weights):
            return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        copy = self._copy_of(x, weights, biases, encoder)
        if copy is None:
            return tuple(self.product(x, weight, bias, encoder) for weight, bias in zip(weights, biases, strict=True))
        return copy(x).split([len(weight) for weight in weights], dim=-1)

    def quantized_product(self, x: Tensor, *weights: QuantizedWeight) -> Tensor:
        """x [M, I] times frozen matrices in few bits, one below the other -> [M, O of all] in x's dtype.

        Few rows in bfloat16 by a kernel that reads codes, where there is one and room for what it needs.
        """
        if takes_few_rows(x) and (own := self._few_row_product(weights, x.shape[0] == 1)) is not None:
            return own.multiply(x)
        if len(weights) == 1:
            return weights[0].product(x)
        return torch.cat([self.quantized_product(x, weight) for weight in weights], dim=-1)

    def quantized_products(
        self, x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """The products of x [M, I] with several such matrices, plus biases [O] -> [M, O] of each, in x's dtype."""
        outputs = self.quantized_product(x, *weights).split([weight.shape[0] for weight in weights], dim=-1)
        return tuple(y if bias is None else y + bias.to(y.dtype) for y, bias in zip(outputs, biases, strict=True))

    def quantized_product_of(
        self, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None], dtype: torch.dtype
    ) -> QuantizedProduct | None:
        """`quantized_product` of activations of a type, plus biases; None where some have a bias and others not."""
        if len({bias is None for bias in biases}) > 1:
            return None
        return QuantizedProduct(self, tuple(weights), _stacked_bias(biases, dtype))

    def quantized_grouped_product(self, x: Tensor, weight: StackedQuantizedWeight, counts: Tensor) -> Tensor:
        """Rows x [N, I], those of each matrix together, times frozen matrices in few bits -> [N, O] in x's dtype.

        counts [E]: rows of each matrix. Each is multiplied as in `quantized_product`, by the rows that it has.
        """
        if x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return quantized_grouped_mm(x, weight, counts, transposed=True)
        sizes = counts.tolist()
        own = [
            self._few_row_product_of(weight, index, size == 1) if 0 < size <= FEW_ROWS else None
            for index, size in enumerate(sizes)
        ]
        groups = list(zip(x.split(sizes), own, strict=True))
        left = [size if product is None else 0 for size, product in zip(sizes, own, strict=True)]
        rows_left = torch.cat([x[:0], *(rows for rows, product in groups if product is None)])
        dequantized = quantized_grouped_mm(rows_left, weight, counts.new_tensor(left), transposed=True).split(left)
        return torch.cat(
            [
                y if product is None else product.multiply(rows)
                for y, (rows, product) in zip(dequantized, groups, strict=True)
            ]
        )

    def _few_row_product(self, weights: tuple[QuantizedWeight, ...], is_one: bool) -> FewRowProduct | None:
        """The product of few rows, or the one of a single row; None where there is none, or no room for its copy."""
        key = weights, is_one
        if key not in self._few_row_products:
            first, *others = weights
            product = self._with_room(first.few_row_product(*others, is_one=is_one))
            if product is None and is_one:
                product = self._few_row_product(weights, False)
            self._few_row_products[key] = product
        return self._few_row_products[key]

    def _few_row_product_of(self, weight: StackedQuantizedWeight, index: int, is_one: bool) -> FewRowProduct | None:
        """That of one of stacked matrices."""
        products, key = self._stacked_few_row_products.setdefault(weight, {}), (index, is_one)
        if key not in products:
            product = self._with_room(weight.few_row_product(index, is_one=is_one))
            if product is None and is_one:
                product = self._few_row_product_of(weight, index, False)
            products[key] = product
        return products[key]

    def _with_room(self, product: FewRowProduct | None) -> FewRowProduct | None:
        """A product, with its copies counted from now on; None where they have no room."""
        if product is None or not self._has_room(product.copied_bytes):
            return None
        self._few_row_bytes += product.copied_bytes
        return product

    def _has_room(self, added_bytes: int) -> bool:
        return self._taken_bytes + self._few_row_bytes + added_bytes <= self.limit_bytes

    def grouped_product(self, x: Tensor, weight: Tensor, counts: Tensor, encoder: WeightEncoder) -> Tensor:
        """Rows x [N, I], those of each layer together, times weight [G, O, I] encoded -> [N, O] in x's dtype.

        counts [G]: rows of each layer; layers that never had one are not encoded.
        """
        copy = self._stacked_copies.get(id(weight))
        if copy is None or copy.version != weight._version or copy.dtype != x.dtype or copy.encoder is not encoder:
            copy = self._stacked_copies[id(weight)] = _StackedCopy(weight, weight._version, x.dtype, encoder)
        y = x.new_empty(len(x), weight.shape[1])
        start = 0
        for index, count in enumerate(counts.tolist()):
            if count:
                y[start : start + count] = copy.product(index)(x[start : start + count])
                start += count
        return y

    def product_of(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        dtype: torch.dtype,
        encoder: WeightEncoder | None = None,
    ) -> Product | None:
        """The product of activations of a type with weights [O, I], one below the other; None where there is no room
        for a copy, or some have a bias and others not."""
        if len({bias is None for bias in biases}) > 1:
            return None
        key, of = tuple(weights), tuple(biases)
        copy = self._copies.get(tuple(map(id, key)))
        if copy is not None and copy.follows(key, of, dtype, encoder):
            return copy
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            return None  # made for this product alone, such as an adapter's effective weight
        if encoder is not None:
            return self._new_encoded_copy(key, of, dtype, encoder)
        return self._new_copy(key, of, dtype, can_pack(dtype, weights[0].device))

    def _copy_of(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        encoder: WeightEncoder | None = None,
    ) -> Product | None:
        """A copy for products with x [M, I]; None where the weights as they are do as well, or room is lacking."""
        return None if x.shape[0] == 0 else self.product_of(weights, biases, x.dtype, encoder)

    def _new_encoded_copy(
        self,
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor | None, ...],
        dtype: torch.dtype,
        encoder: WeightEncoder,
    ) -> Product:
        multiply = encoder([weight.detach().to(dtype) for weight in weights])
        bias, versions = _stacked_bias(biases, dtype), _versions(weights, biases)
        copy = self._copies[tuple(map(id, weights))] = Product(
            weights, biases, versions, dtype, multiply, bias, encoder
        )
        return copy

    def _new_copy(
        self, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], dtype: torch.dtype, packed: bool
    ) -> Product | None:
        key = tuple(map(id, weights))
        if all(weight.dtype == dtype for weight in weights):
            added_bytes = sum(weight.nbytes for weight in weights)
            if not packed or (key not in self._copies and not self._has_room(added_bytes)):
                return None
            self._taken_bytes += added_bytes if key not in self._copies else 0
        bias, versions = _stacked_bias(biases, dtype), _versions(weights, biases)
        multiply = _plain_product(_stacked(weights, dtype), bias, packed=packed)
        copy = self._copies[key] = Product(weights, biases, versions, dtype, multiply, bias)
        return copy


def takes_few_rows(x: Tensor) -> bool:
    """Whether matrices in few bits may be multiplied with x [M, I] as they are stored."""
    return x.dtype == torch.bfloat16 and len(x) <= FEW_ROWS and x.device.type == "cpu" and not x.requires_grad


class _StackedCopy:
    """The encoded weights of stacked layers, each made when it first has a row.

    weight [G, O, I] is kept, so that its id is no other's.
    """

    def __init__(self, weight: Tensor, version: int, dtype: torch.dtype, encoder: WeightEncoder) -> None:
        self.weight, self.version, self.dtype, self.encoder = weight, version, dtype, encoder
        self._products: dict[int, Callable[[Tensor], Tensor]] = {}

    def product(self, index: int) -> Callable[[Tensor], Tensor]:
        """x [M, I] times the weight of one layer -> [M, O]."""
        if (product := self._products.get(index)) is None:
            product = self._products[index] = self.encoder([self.weight[index].detach().to(self.dtype)])
        return product


@cache
def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch, on this machine, has oneDNN's packed products of a type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def _is_read_at_once(x: Tensor, elements: int) -> bool:
    """Whether weights of `elements` elements, in x's type, are multiplied with x [M, I] faster as they are."""
    return x.shape[0] == 1 and elements < LEAST_OF_ONE_ROW and x.dtype == torch.float32


def _plain_product(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Callable[[Tensor], Tensor]:
    """Returns the product of x [M, I] with a copy of weights [O, I], in oneDNN's order where it is packed."""
    if not packed:
        return lambda x: F.linear(x, weight, bias)
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
    linear_pointwise = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor) -> Tensor:
        y: Tensor = linear_pointwise(x.contiguous(), ordered, bias, "none", [], "")
        return y

    return product


def _stacked_bias(biases: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    return None if biases[0] is None else _stacked([bias for bias in biases if bias is not None], dtype)


def _versions(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(source._version for source in (*weights, *biases) if source is not None)


def _stacked(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [part.detach().to(dtype) for part in parts]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


class _Thread(threading.local):
    packed_weights: PackedWeights | None = None


ACTIVE = _Thread()
"""`ACTIVE.packed_weights` are those that are active in this thread, if any are."""
