from __future__ import annotations

import numpy as np
import pytest

from danlu.core.errors import DataError
from danlu.data.mixture import epoch_rows, hold_out
from danlu.data.permutation import Permutation


@pytest.mark.parametrize(("share", "expected"), [(0.1, 15), (0.001, 1), (7, 7)])
def test_hold_out_takes_the_share_or_number_asked_for(share: float | int, expected: int) -> None:
    masks = hold_out([100, 50], share, seed=1)
    assert [len(mask) for mask in masks] == [100, 50]
    assert sum(int(mask.sum()) for mask in masks) == expected


def test_hold_out_is_drawn_by_the_seed() -> None:
    first, same, other = (np.concatenate(hold_out([100, 50], 20, seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)


def test_holding_out_everything_is_an_error() -> None:
    with pytest.raises(DataError, match="data.eval: 9 holds out 9 of 9 rows, which leaves none to train on"):
        hold_out([4, 5], 9, seed=0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("counts", "eval"), [([100, 1], 50), ([100, 1, 2, 1], 0.9), ([2, 2], 2), ([1, 3, 1], 2)])
def test_every_source_keeps_a_row(counts: list[int], eval: float | int, seed: int) -> None:
    masks = hold_out(counts, eval, seed)
    wanted = eval if isinstance(eval, int) else round(eval * sum(counts))
    assert sum(int(mask.sum()) for mask in masks) == wanted
    assert all(not mask.all() for mask in masks)


def test_rows_are_held_out_as_drawn_where_every_source_keeps_one() -> None:
    mask = np.concatenate(hold_out([100, 50], 20, seed=3))
    assert np.array_equal(np.flatnonzero(mask), np.sort(Permutation.of(150, 3, "eval").take(np.arange(20))))
    # Negative control: here the draw itself leaves the second source nothing.
    seed = next(seed for seed in range(1000) if 100 in Permutation.of(101, seed, "eval").take(np.arange(20)))
    assert not np.concatenate(hold_out([100, 1], 20, seed))[100]


def test_more_rows_held_out_than_leave_each_source_one_is_an_error() -> None:
    problem = "data.eval: 9 holds out 9 of 10 rows, which leaves 1 to train on for 2 sources; each keeps one, so at "
    with pytest.raises(DataError, match=f"{problem}most 8 can be held out. data.train.1 is the smallest, with 3 rows"):
        hold_out([7, 3], 9, seed=0)


def test_without_weights_every_row_once() -> None:
    assert [rows.tolist() for rows in epoch_rows([3, 2], [None, None], 0)] == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("counts", "weights", "expected"),
    [([1000, 10], [0.5, 0.5], [1000, 1000]), ([1000, 900], [9, 1], [1000, 111]), ([100, 100], [3, 1], [100, 33])],
)
def test_weights_are_proportions_of_rows(counts: list[int], weights: list[float | None], expected: list[int]) -> None:
    assert [len(rows) for rows in epoch_rows(counts, weights, 0)] == expected


@pytest.mark.parametrize("weights", [[1e308, 1e-308], [1e12, 1.0]])
def test_weights_too_far_apart_are_an_error(weights: list[float | None]) -> None:
    with pytest.raises(DataError, match=r"data\.train\.0\.weight: 1e\+\d+ next to .* of data\.train\.1, the largest"):
        epoch_rows([10, 1000], weights, 0)
    assert [len(rows) for rows in epoch_rows([10, 1000], weights[::-1], 0)] == [1, 1000]


def test_a_small_source_is_repeated_evenly() -> None:
    large, small = epoch_rows([1000, 300], [1, 1], 5)
    assert np.array_equal(large, np.arange(1000))
    counts = np.bincount(small, minlength=300)
    assert set(counts.tolist()) == {3, 4} and counts.sum() == 1000
    assert np.array_equal(small, epoch_rows([1000, 300], [1, 1], 5)[1])
    assert not np.array_equal(small, epoch_rows([1000, 300], [1, 1], 6)[1])
