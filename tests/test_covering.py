"""Cases that leave combinations out hold all of the strength that is asked for."""

from __future__ import annotations

import itertools

import pytest
from builders.covering import covering

COLUMNS = (["a", "b", "c"], [1, 2], [None, 0.5, 3.0], [False, True], ["x", "y", "z", "w"])


def combinations(cases: list[tuple[object, ...]], strength: int) -> set[object]:
    places = itertools.combinations(range(len(COLUMNS)), strength)
    return {(chosen, tuple(case[each] for each in chosen)) for chosen in places for case in cases}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 16), (3, 48)])
def test_every_combination_of_the_strength_is_there(strength: int, most: int) -> None:
    cases, product = covering(*COLUMNS, strength=strength), list(itertools.product(*COLUMNS))
    assert combinations(cases, strength) == combinations(product, strength)
    assert cases == covering(*COLUMNS, strength=strength) == [case for case in product if case in cases]
    assert len(cases) <= most < len(product) == 144
    # Control: every case is needed for something, or one that is left out is missed.
    assert any(combinations(cases[:n] + cases[n + 1 :], strength) != combinations(cases, strength) for n in range(3))


def test_as_many_parameters_as_the_strength_are_the_product() -> None:
    assert covering([1, 2], "ab") == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
