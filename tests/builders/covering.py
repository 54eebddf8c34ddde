"""Cases of many parameters in which all values meet that could disagree, without all of their combinations."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Cases as parameters: those of `chosen` are of the fast tests, all others of the slow ones.

    A case of several parameters is a tuple.
    """
    every = list(cases)
    assert all(one in every for one in chosen), "a case that is chosen is none of them"
    return [
        one if one in chosen else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in every
    ]


def fast_pairs(*values: Collection[Any]) -> list[Any]:
    """The whole product as parameters, of which those of `covering` are of the fast tests."""
    return fast(itertools.product(*values), *covering(*values))


def covering(*values: Collection[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Cases that hold every combination of values of any `strength` parameters at least once.

    Few faults take more than two or three values that meet (Kuhn, Wallace and Gallo, "Software Fault Interactions and
    Implications for Software Testing", 2004). The cases are the same each time, and in the order of the whole product.
    """
    parameters = list(itertools.combinations(range(len(values)), strength))
    product = list(itertools.product(*(range(len(column)) for column in values)))
    combinations = [{(chosen, tuple(case[each] for each in chosen)) for chosen in parameters} for case in product]
    left, taken = set().union(*combinations), set()
    while left:
        best = max(range(len(product)), key=lambda number: len(combinations[number] & left))
        left -= combinations[best]
        taken.add(best)
    columns = [list(column) for column in values]
    return [tuple(map(list.__getitem__, columns, product[number])) for number in sorted(taken)]
