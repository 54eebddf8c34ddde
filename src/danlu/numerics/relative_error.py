"""The error of numbers relative to their expected values; it is infinite for values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


class RelativeErrors(dict[str, float]):
    """Relative errors by name."""

    @property
    def mean(self) -> float:
        """The mean of all; 0 without any."""
        return sum(self.values()) / len(self) if self else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        """The name with the largest error, and that; one that is not finite comes first."""
        # `max` alone would pass over a NaN.
        return max(self.items(), key=lambda item: (not math.isfinite(item[1]), item[1]), default=("", 0.0))


def worst_error(errors: Iterable[float]) -> float:
    """The largest of several errors, infinite where one of them is not finite.

    Python's `max` passes over a NaN that does not come first, because every comparison with NaN is false.

    Raises ValueError where there is no error at all, as `max` does: nothing was compared then.
    """
    listed = list(errors)
    return max(listed) if all(map(math.isfinite, listed)) else math.inf


def relative_error(actual: Tensor, expected: Tensor, whole: Tensor | None = None) -> float:
    """||actual - expected|| / ||whole||, 2-norms in float64; `whole` is `expected` unless that is a shard of it.

    0 where both norms are 0; infinite for another shape, for numbers that are not finite (an infinity that both
    have included, as nothing can be said of its error), and where only `whole` is zero.
    """
    if actual.shape != expected.shape:
        return math.inf
    distance = float((actual.double() - expected.double()).norm())
    length = float((expected if whole is None else whole).double().norm())
    if not math.isfinite(distance) or not math.isfinite(length):
        return math.inf
    return distance / length if length else (0.0 if distance == 0 else math.inf)
