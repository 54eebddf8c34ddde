"""Which of two evaluations is better, in both directions."""

from __future__ import annotations

import math

import pytest

from danlu.training.criterion import LOSS, Criterion

ACCURACY = Criterion("accuracy", higher_is_better=True)


@pytest.mark.parametrize(
    ("value", "best", "min_delta", "lower_is", "higher_is"),
    [
        (2.0, None, 0.0, True, True),
        (2.0, math.nan, 0.0, True, True),
        (2.0, 2.0, 0.0, False, False),
        (1.9, 2.0, 0.0, True, False),
        (1.9, 2.0, 0.2, False, False),
        (2.1, 2.0, 0.0, False, True),
        (2.1, 2.0, 0.2, False, False),
        (math.nan, None, 0.0, False, False),
        (math.nan, 2.0, 0.0, False, False),
        (math.inf, 2.0, 0.0, False, True),
    ],
)
def test_which_is_better(value: float, best: float | None, min_delta: float, lower_is: bool, higher_is: bool) -> None:
    assert LOSS.is_better(value, best, min_delta) == lower_is
    assert ACCURACY.is_better(value, best, min_delta) == higher_is


def test_the_best_costs_least() -> None:
    values = [0.5, math.nan, 0.9, 0.1]
    assert min(values, key=LOSS.cost) == 0.1 and min(values, key=ACCURACY.cost) == 0.9
    assert LOSS.superlative == "lowest evaluation loss" and ACCURACY.superlative == "highest evaluation accuracy"
