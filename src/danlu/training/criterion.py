"""The number of an evaluation that judges a run, and which of two is better. No torch: listings need it too."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Criterion:
    """An assessment by its name, and whether more of it is better."""

    metric: str = "loss"
    higher_is_better: bool = False

    def is_better(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Whether `value` is better than `best` by more than `min_delta`.

        NaN is better than nothing; any other number is better than none (None) and than NaN.
        """
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return value > best + min_delta if self.higher_is_better else value < best - min_delta

    def cost(self, value: float) -> float:
        """`value` so that less of it is better, to sort by; NaN is the worst."""
        if math.isnan(value):
            return math.inf
        return -value if self.higher_is_better else value

    @property
    def superlative(self) -> str:
        """The best value in words, for messages: `lowest evaluation loss`."""
        return f"{'highest' if self.higher_is_better else 'lowest'} evaluation {self.metric}"


LOSS = Criterion()
"""The criterion of runs with recipes that name no other."""
