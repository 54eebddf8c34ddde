"""Weights packed for the products of a rollout: a row for each growing sequence, and the same weights all the time.

Decoding is bound by how fast weights are read, and on a CPU by the order they lie in: oneDNN reads copies that it has
ordered itself two to four times as fast as MKL reads a matrix. Two threads of a Zen 4, in us, unpacked/packed:

    float32   [4096, 256]   1 row 108/51   8 rows 231/98    64 rows 1313/620   512 rows 7137/5180
    bfloat16  [32000, 512]  1 row 1934/631  8 rows 2388/1126  64 rows 6540/5320

That is another order of the same sums than training's, so products are made this way only where `PackedWeights` are
active, which the rollout engine's fast numerics see to.

M rows · I in features · O out features
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Which order oneDNN chooses hangs on the rows that it expects; this one serves from 2 to 512 rows well (measured).
EXPECTED_ROWS = 32
# One float32 row: a call of oneDNN takes 17 us at least, in which MKL has read so large a weight.
LEAST_OF_ONE_ROW = 1 << 18


@dataclass(frozen=True)
class Product:
    """A copy of the weights of layers that share one x, one below the other, in the type of activations."""

    weights: tuple[Tensor, ...]  # with the biases kept, so that their ids are no others'
    biases: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    """The version counters of weights and biases."""
    weight: Tensor
    """The weight [O, I], or oneDNN's packed form of it."""
    bias: Tensor | None
    """[O]"""
    packed: bool

    def follows(self, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], dtype: torch.dtype) -> bool:
        """Whether the product still belongs to the present weights and biases."""
        if self.weight.dtype != dtype or not all(map(operator.is_, self.biases, biases)):
            return False
        sources = weights if self.bias is None else (*weights, *self.biases)
        return self.versions == tuple([source._version for source in sources if source is not None])

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [M, I] -> [M, O], plus a residual [M, O], which is left as it is."""
        weight, *more = self.weights
        if not more and self.bias is None and weight.dtype == x.dtype and _is_read_at_once(x, weight.numel()):
            return torch.addmm(residual, x, weight.t())
        return self(x).add_(residual)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O]."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.weight, self.bias, "none", [], "")
        return y


class PackedWeights:
    """Makes the products of linear layers in a thread while it is active, with copies of their weights.

    A copy is used as long as its weights do not change. Weights of another type than activations, such as a trainer's
    float32 ones, are cast once and not for every token.

    limit_bytes: the memory for copies of weights that could be multiplied as they are; weights beyond it are multiplied
    as they are.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._copies: dict[tuple[int, ...], Product] = {}  # by the ids of the weights

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

    def clear(self) -> None:
        """Gives the memory of copies back."""
        self._copies, self._taken_bytes = {}, 0

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [.., I] @ weight [O, I].T, plus bias [O] -> [.., O] in x's dtype."""
        if _is_read_at_once(x, weight.numel()) and weight.dtype == x.dtype:
            return F.linear(x, weight, bias)
        rows = x.flatten(0, -2) if x.ndim > 2 else x
        copy = self._copy_of(rows, (weight,), (bias,))
        if copy is None:
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        y = copy(rows)
        return y.unflatten(0, x.shape[:-1]) if x.ndim > 2 else y

    def products(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The products of x [M, I] with several weights [O, I] -> [M, O] of each, views of one tensor where they are
        made as one."""
        elements = sum([weight.numel() for weight in weights])
        if _is_read_at_once(x, elements) and all(weight.dtype == x.dtype for weight in weights):
            return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        copy = self._copy_of(x, weights, biases)
        if copy is None:
            return tuple(self.product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return copy(x).split([len(weight) for weight in weights], dim=-1)

    def product_of(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dtype: torch.dtype
    ) -> Product | None:
        """The product of activations of a type with weights [O, I], one below the other; None where there is no room
        for a copy, or some have a bias and others not."""
        if len({bias is None for bias in biases}) > 1:
            return None
        key, of = tuple(weights), tuple(biases)
        copy = self._copies.get(tuple(map(id, key)))
        if copy is not None and copy.follows(key, of, dtype):
            return copy
        return self._new_copy(key, of, dtype, can_pack(dtype, weights[0].device))

    def _copy_of(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product | None:
        """A copy for products with x [M, I]; None where the weights as they are do as well, or room is lacking."""
        return None if x.shape[0] == 0 else self.product_of(weights, biases, x.dtype)

    def _new_copy(
        self, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], dtype: torch.dtype, packed: bool
    ) -> Product | None:
        key = tuple(map(id, weights))
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            return None  # made for this product alone, such as an adapter's effective weight
        if all(weight.dtype == dtype for weight in weights):
            added_bytes = sum(weight.nbytes for weight in weights)
            if not packed or (key not in self._copies and self._taken_bytes + added_bytes > self.limit_bytes):
                return None
            self._taken_bytes += added_bytes if key not in self._copies else 0
        weight = _stacked(weights, dtype)
        if packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        bias = None if biases[0] is None else _stacked([bias for bias in biases if bias is not None], dtype)
        versions = tuple(source._version for source in (*weights, *biases) if source is not None)
        copy = self._copies[key] = Product(weights, biases, versions, weight, bias, packed)
        return copy


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


def _stacked(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [part.detach().to(dtype) for part in parts]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


class _Thread(threading.local):
    packed_weights: PackedWeights | None = None


ACTIVE = _Thread()
"""`ACTIVE.packed_weights` are those that are active in this thread, if any are."""
