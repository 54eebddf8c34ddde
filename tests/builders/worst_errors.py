"""How far tensors by name are from what they should be, as tests compare them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from danlu.numerics.relative_error import relative_error, worst_error


def worst_relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The worst `relative_error` of several tensors by name; infinite where a name is on one side only."""
    if actual.keys() != expected.keys():
        return math.inf
    return worst_error(relative_error(actual[name], tensor) for name, tensor in expected.items())


def worst_absolute_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """max |actual - expected| over all elements of tensors by name, in float64; infinite as for relative ones."""
    if actual.keys() != expected.keys() or any(actual[name].shape != tensor.shape for name, tensor in expected.items()):
        return math.inf
    # torch's max, unlike Python's, gives NaN where a NaN is among its numbers.
    return worst_error(
        float((actual[name].double() - tensor.double()).abs().max()) for name, tensor in expected.items()
    )
