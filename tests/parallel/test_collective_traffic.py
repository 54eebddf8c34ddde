"""The table of what was sent beside what ought to be."""

from __future__ import annotations

from fractions import Fraction

import pytest

from danlu.parallel.collective_traffic import HEADINGS, CollectiveTraffic, Kind, axis_along, axis_of, ring_bytes, table
from danlu.parallel.layout import Layout


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [
        ("all-reduce", 4, 1500),
        ("all-gather", 4, 750),
        ("reduce-scatter", 3, Fraction(2000, 3)),
        ("point-to-point", 4, 1000),
        ("all-reduce", 1, 0),
    ],
)
def test_a_ring_sends(kind: Kind, size: int, sent: Fraction | int) -> None:
    assert ring_bytes(kind, size, 1000) == sent


def test_axes_are_those_along_which_ranks_differ() -> None:
    layout = Layout(replicate=2, shard=2, tensor=2)
    assert axis_of([0, 1], layout) == "tensor"
    assert axis_of([1, 3], layout) == "shard"
    assert axis_of([0, 2, 4, 6], layout) == "replicate x shard"
    assert axis_of(range(8), layout) == "replicate x shard x tensor"
    assert axis_of([5], layout) == "alone"
    assert axis_along(layout, "replicate", "shard") == ("replicate x shard", 4)
    assert axis_along(Layout(shard=4), "replicate", "shard") == ("shard", 4)
    assert axis_along(Layout(shard=4), "tensor") == ("alone", 1)


def test_lines_are_summed_and_judged() -> None:
    measured = [
        CollectiveTraffic("shard", "all-gather", Fraction(1500), calls=2),
        CollectiveTraffic("shard", "all-gather", Fraction(500), calls=1),
        CollectiveTraffic("replicate", "all-reduce", Fraction(40), calls=5),
        CollectiveTraffic("tensor", "all-reduce", Fraction(7000), calls=1),
    ]
    formula = [
        CollectiveTraffic("shard", "all-gather", Fraction(1990), what="parameters"),
        CollectiveTraffic("shard", "reduce-scatter", Fraction(10), what="gradients"),
    ]
    rows = table(measured, formula, beside_bytes=50)
    assert [(row.axis, row.kind, row.calls, row.agrees) for row in rows] == [
        ("replicate", "all-reduce", 5, True),  # single numbers
        ("shard", "all-gather", 3, True),
        ("shard", "reduce-scatter", 0, False),  # nothing was sent
        ("tensor", "all-reduce", 1, False),  # nothing ought to be
    ]
    assert rows[1].cells() == ("shard", "all-gather", "parameters", "3", "2,000", "1,990", "1.0050", "yes")
    assert rows[3].cells() == ("tensor", "all-reduce", "in no formula", "1", "7,000", "0", "–", "NO")
    assert all(len(row.cells()) == len(HEADINGS) for row in rows)


@pytest.mark.parametrize(("sent", "agrees"), [(999, False), (1000, True), (1050, True), (1051, False)])
def test_less_than_the_formula_is_as_wrong_as_more(sent: int, agrees: bool) -> None:
    formula = [CollectiveTraffic("shard", "all-gather", Fraction(1000), what="parameters")]
    (row,) = table([CollectiveTraffic("shard", "all-gather", Fraction(sent), calls=1)], formula, beside_bytes=50)
    assert row.agrees is agrees
