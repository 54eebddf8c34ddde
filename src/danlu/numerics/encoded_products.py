"""Products of rollouts with weights that are encoded once, after each update: 8-bit integers, or FP8 as in training.

With int8 both factors are integers with a float32 scale for each row: of x, and of the weight. Their products are added
up exactly, so a token's result hangs neither on its neighbours nor on threads, nor on the processor: one without
integer products (AVX512 VNNI) adds the same integers in float32, in parts of 1,024 terms that it holds exactly. It is
no faster then. FP8 encodes x and the weight in the blocks of a recipe of `precision: fp8` (`arithmetic.RECIPES`).

M rows · I, O inputs and outputs of a layer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.numerics.arithmetic import RECIPES
from danlu.numerics.format import WHOLE, Format, encode
from danlu.numerics.products import prepared

INT8_ROWS = Format("int8", (1, WHOLE), narrow_range=True)
"""-127 to 127 with a scale for each row."""
EXACT_TERMS = 1024
"""The most products of 8-bit integers that float32 adds up exactly: 2^24 / 128^2."""
_CUDA_ROWS, _CUDA_MULTIPLE = 32, 8
"""cuBLAS takes more than 16 rows, and widths that are multiples of 8."""


def encoder_of(
    precision: Literal["int8", "fp8"], fp8_recipe: str
) -> Callable[[Sequence[Tensor]], Callable[[Tensor], Tensor]]:
    """Returns the function of weights [O, I] that encodes them and returns their product with x [M, I] -> [M, O].

    fp8_recipe: of `RECIPES`, for fp8.
    """
    return Int8Product if precision == "int8" else partial(Fp8Product, recipe=fp8_recipe)


class Int8Product:
    """x [M, I] times weights [O, I], one below the other, as 8-bit integers -> [M, O] in x's dtype."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        scaled = encode(torch.cat([weight.detach() for weight in weights]), INT8_ROWS)
        self._scales = scaled.scales.reshape(1, -1)  # [1, O] float32
        self._sums = integer_sums(scaled.codes)

    def __call__(self, x: Tensor) -> Tensor:
        scaled = encode(x, INT8_ROWS)
        return (self._sums(scaled.codes) * scaled.scales * self._scales).to(x.dtype)


class Fp8Product:
    """x [M, I] times weights [O, I], one below the other, in the formats of the forward product of an FP8 recipe ->
    [M, O] in x's dtype."""

    def __init__(self, weights: Sequence[Tensor], recipe: str) -> None:
        formats = RECIPES[recipe]
        self._x = formats.x
        dtype = weights[0].dtype
        # Each by itself: blocks of several rows end with a weight.
        encoded = [encode(weight.detach(), formats.weight) for weight in weights]
        self._products = [prepared(formats.x, each, dtype) for each in encoded]

    def __call__(self, x: Tensor) -> Tensor:
        scaled = encode(x, self._x)
        outputs = [product(scaled) for product in self._products]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def integer_sums(codes: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the function of codes [M, I] int8 that adds up their products with codes [O, I] -> [M, O], integers in
    float32, rounded once where they exceed 2^24."""
    device = codes.device
    if device.type == "cpu" and _has_integer_products():
        factor = codes.t()
        return lambda x: torch._int_mm(x, factor).float()
    if device.type == "cuda" and all(size % _CUDA_MULTIPLE == 0 for size in codes.shape):
        factor = codes.t()

        def on_cuda(x: Tensor) -> Tensor:
            rows = len(x)
            sums = torch._int_mm(F.pad(x, (0, 0, 0, max(0, _CUDA_ROWS - rows))), factor)
            return sums[:rows].float()

        return on_cuda
    return _in_float_parts(codes)


def _in_float_parts(codes: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns `integer_sums` by float32 products of at most `EXACT_TERMS` terms, added up as integers."""
    parts = [part.float() for part in codes.split(EXACT_TERMS, dim=1)]

    def sums(x: Tensor) -> Tensor:
        of_parts = [F.linear(x_part.float(), part) for x_part, part in zip(x.split(EXACT_TERMS, 1), parts, strict=True)]
        if len(of_parts) == 1:
            return of_parts[0]
        total = of_parts[0].to(torch.int32)
        for part in of_parts[1:]:
            total += part.to(torch.int32)
        return total.float()

    return sums


@cache
def _has_integer_products() -> bool:
    """Whether this CPU multiplies 8-bit integers, and oneDNN is there to have it do so."""
    supported: Callable[[], bool] | None = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and bool(supported()) and torch.backends.mkldnn.is_available()
