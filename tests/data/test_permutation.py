from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.data.permutation import Permutation, key


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1))
def test_order_is_a_permutation(n: int, seed: int) -> None:
    assert sorted(Permutation.of(n, seed).all().tolist()) == list(range(n))


def test_one_element_equals_the_whole_order() -> None:
    order = Permutation.of(1237, 5, "rows", 3)
    whole = order.all()
    assert [order[i] for i in (0, 1, 600, 1236)] == whole[[0, 1, 600, 1236]].tolist()
    assert np.array_equal(order.take(np.arange(100, 200)), whole[100:200])


def test_order_is_fixed_for_good() -> None:
    """Runs of earlier versions resume in the same order only while these numbers stay."""
    assert Permutation.of(10, 0, "rows").all().tolist() == [8, 6, 1, 3, 2, 0, 7, 4, 5, 9]


def test_seeds_epochs_and_purposes_differ() -> None:
    orders = [
        Permutation.of(100, *path).all().tolist() for path in [(0,), (1,), (0, 0), (0, 1), (0, "eval"), (0, "packs", 1)]
    ]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert key(1, 23) != key(12, 3)


SLOW = pytest.mark.slow  # orders of few elements are walked through many numbers each


@pytest.mark.parametrize(
    ("n", "draws"), [(7, 350), (100, 600), *(pytest.param(n, 1500, marks=SLOW) for n in (2, 3, 7, 64, 100))]
)
def test_every_element_is_equally_likely_everywhere(n: int, draws: int) -> None:
    counts = np.zeros((n, n))
    for seed in range(draws):
        counts[np.arange(n), Permutation.of(n, seed).all()] += 1
    expected = draws / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (n - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees) + 3


def test_neighbours_are_not_kept_together() -> None:
    order = Permutation.of(20_000, 1).all()
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert (np.abs(np.diff(order)) == 1).sum() < 20  # two expected by chance


def test_positions_outside_are_refused() -> None:
    with pytest.raises(IndexError, match="position 5 of an order of 5"):
        Permutation.of(5, 0).take(np.array([5]))
