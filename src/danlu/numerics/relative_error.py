"""How far numbers are from what they should be; what is not finite is infinitely far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor


def worst_error(errors: Iterable[float]) -> float:
    """The largest of several errors, infinite where one of them is not finite.

    Python's `max` passes over a NaN that does not come first, because every comparison with NaN is false.

    Raises ValueError where there is no error at all, as `max` does: nothing was compared then.
    """
    found = list(errors)
    return max(found) if all(map(math.isfinite, found)) else math.inf


def relative_error(found: Tensor, wanted: Tensor, whole: Tensor | None = None) -> float:
    """||found - wanted|| / ||whole||, 2-norms in float64; `whole` is `wanted` unless `wanted` is a shard of it.

    0 where both norms are 0; infinite for another shape, for numbers that are not finite (an infinity that both
    have included, as nothing can be said of its error), and where only `whole` is zero.
    """
    if found.shape != wanted.shape:
        return math.inf
    distance = float((found.double() - wanted.double()).norm())
    length = float((wanted if whole is None else whole).double().norm())
    if not math.isfinite(distance) or not math.isfinite(length):
        return math.inf
    return distance / length if length else (0.0 if distance == 0 else math.inf)


def worst_relative_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The worst `relative_error` of several tensors by name; infinite where a name is on one side only."""
    if found.keys() != wanted.keys():
        return math.inf
    return worst_error(relative_error(found[name], one) for name, one in wanted.items())


def worst_absolute_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """max |found - wanted| over all numbers of several tensors by name, in float64; infinite as for relative ones."""
    if found.keys() != wanted.keys() or any(found[name].shape != one.shape for name, one in wanted.items()):
        return math.inf
    # torch's max, unlike Python's, gives NaN where a NaN is among its numbers.
    return worst_error(float((found[name].double() - one.double()).abs().max()) for name, one in wanted.items())
