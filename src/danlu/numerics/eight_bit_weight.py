"""Frozen matrices in 8 bits that multiply activations in 8 bits (W8A8): of integers (SmoothQuant, arXiv:2211.10438), of
FP8.

Each token is rounded when it comes, with a scale of its own, as the schemes `dynamic: true, strategy: token` of
compressed-tensors say. Integers are added up exactly (`encoded_products`), numbers in FP8 in float32 (`products`). For
answers alone: the rounding of activations has no gradient.

T tokens · I, O inputs and outputs
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from danlu.core.layer_types import QuantizedWeight
from danlu.numerics.encoded_products import integer_sums
from danlu.numerics.format import WHOLE, Format, Scaled, encode
from danlu.numerics.products import product
from danlu.numerics.scaled_weight import ScaledWeight

TOKENS = Format("int8", (1, WHOLE))
"""The format of activations: a float32 scale for each token, its largest magnitude over 127.5, codes from -128 to
127."""
FP8_TOKENS = Format("e4m3", (1, WHOLE))
"""That of activations in FP8: a float32 scale for each token, its largest magnitude over 448."""


class _EightBitWeight(ScaledWeight):
    """A frozen matrix [O, I] for activations in 8 bits."""

    rounds_activations = True

    def product(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] in x's type: the product of each token's codes and the matrix's, times both scales in
        float32."""
        assert not x.requires_grad, "activations are rounded without a gradient"
        return self._rounded_product(x)

    @abstractmethod
    def _rounded_product(self, x: Tensor) -> Tensor:
        """`product`, of an x that may be rounded."""

    def few_row_product(self, *below: QuantizedWeight, is_one: bool = False) -> None:
        """None: few rows are rounded as many are."""

    def shard(self, rows: slice, columns: slice) -> ScaledWeight:
        """Some rows by the same codes. Of some columns there would be another scale of a token on each rank."""
        assert columns.stop - columns.start == self.shape[1], "a token has one scale of all its features"
        return type(self).of(self.scaled().box(rows, columns), self.dtype)


class IntegerWeight(_EightBitWeight):
    """A frozen matrix [O, I] of integers with a scale for each row, for activations as integers."""

    def _rounded_product(self, x: Tensor) -> Tensor:
        tokens, weight = encode(x, TOKENS), self.scaled()
        sums = integer_sums(weight.codes)(tokens.codes)
        return (sums * tokens.scales * weight.wide_scales().t()).to(x.dtype)


class Fp8Weight(_EightBitWeight):
    """A frozen matrix [O, I] of E4M3 with a scale for each row or one of all, for activations in E4M3."""

    def _rounded_product(self, x: Tensor) -> Tensor:
        return product(encode(x, FP8_TOKENS), self.scaled(), x.dtype)


def weight_for_eight_bits(weight: Scaled) -> type[ScaledWeight] | None:
    """Returns the class of a matrix that rounds activations to 8 bits; None for a format that has no such products."""
    form, (outputs, inputs) = weight.format, weight.shape
    if form.zero != "none" or weight.groups is not None:
        return None
    block = form.block_of(outputs, inputs)
    if form.element == "int8" and block == (1, inputs):
        return IntegerWeight
    return Fp8Weight if form.element == "e4m3" and block in ((1, inputs), (outputs, inputs)) else None
