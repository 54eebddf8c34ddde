"""A frozen matrix of 8-bit integers that multiplies 8-bit integers: W8A8 (SmoothQuant, arXiv:2211.10438).

Each token is rounded when it comes, with a scale of its own, as the schemes `dynamic: true, strategy: token` of
compressed-tensors say; the integers are added up exactly (`encoded_products`). For answers alone: the rounding of
activations has no gradient.

T tokens · I, O inputs and outputs
"""

from __future__ import annotations

from torch import Tensor

from danlu.numerics.encoded_products import integer_sums
from danlu.numerics.format import WHOLE, Format, Scaled, encode
from danlu.numerics.scaled_weight import ScaledWeight

TOKENS = Format("int8", (1, WHOLE))
"""The format of activations: a float32 scale for each token, its largest magnitude over 127.5, codes from -128 to
127."""


def multiplies_integers(weight: Scaled) -> bool:
    """Whether a matrix has 8-bit integers with one scale for each row, which products of integers take."""
    form = weight.format
    by_row = form.block_of(*weight.shape) == (1, weight.shape[1])
    return form.element == "int8" and form.zero == "none" and by_row and weight.groups is None


class IntegerWeight(ScaledWeight):
    """A frozen matrix [O, I] in a format of `multiplies_integers`, for activations in 8 bits."""

    rounds_activations = True

    def product(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] in x's type: sums of integers, times the scales of token and output in float32."""
        assert not x.requires_grad, "activations are rounded without a gradient"
        tokens, weight = encode(x, TOKENS), self.scaled()
        sums = integer_sums(weight.codes)(tokens.codes)
        return (sums * tokens.scales * weight.wide_scales().t()).to(x.dtype)

    def shard(self, rows: slice, columns: slice) -> ScaledWeight:
        """Some rows by the same codes. Of some columns there would be another scale of a token on each rank."""
        assert columns.stop - columns.start == self.shape[1], "a token has one scale of all its features"
        return IntegerWeight.of(self.scaled().box(rows, columns), self.dtype)
