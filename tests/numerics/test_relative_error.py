"""Errors that are not finite are never passed over, wherever they stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from builders.worst_errors import worst_absolute_error, worst_relative_error
from torch import Tensor

from danlu.numerics.relative_error import relative_error, worst_error

Worst = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_worst_error_is_infinite_wherever_one_is_not_finite(place: int, bad: float) -> None:
    errors = [1e-9, 2e-9, 3e-9]
    assert worst_error(errors) == 3e-9
    errors[place] = bad
    assert worst_error(iter(errors)) == math.inf


def test_no_error_at_all_is_no_small_one() -> None:
    for nothing in (
        lambda: worst_error([]),
        lambda: worst_relative_error({}, {}),
        lambda: worst_absolute_error({}, {}),
    ):
        with pytest.raises(ValueError, match="empty"):
            nothing()


@pytest.mark.parametrize("worst", [worst_relative_error, worst_absolute_error])
@pytest.mark.parametrize("name", ["first", "second", "third"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_number_that_is_not_finite_is_seen_in_any_tensor(worst: Worst, name: str, bad: float) -> None:
    wanted = {key: torch.full((2, 3), 2.0) for key in ("first", "second", "third")}
    found = {key: value.clone() for key, value in wanted.items()}
    assert worst(found, wanted) == 0
    found[name][1, 2] = bad
    assert worst(found, wanted) == math.inf
    assert worst(wanted, found) == math.inf
    assert worst(found, found) == math.inf  # equal infinities prove nothing either


def test_errors_by_hand() -> None:
    wanted = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.25])}
    assert relative_error(found["a"], wanted["a"]) == pytest.approx(0.1)
    assert relative_error(found["a"][1:], wanted["a"][1:], wanted["a"]) == pytest.approx(0.1)  # of a shard
    assert worst_relative_error(found, wanted) == pytest.approx(0.5)
    assert worst_absolute_error(found, wanted) == pytest.approx(0.5)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf


@pytest.mark.parametrize("worst", [worst_relative_error, worst_absolute_error])
def test_what_only_one_side_has_is_infinitely_far(worst: Worst) -> None:
    one, other = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    assert worst(one, other) == worst(other, one) == math.inf
    assert worst(one, {"a": torch.ones(1)}) == math.inf  # of which broadcasting would make the same numbers
