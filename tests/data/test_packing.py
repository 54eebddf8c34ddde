from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data.packed_dataset import best_fit, concatenate, efficiency, plan_packing

lengths_strategy = st.lists(st.integers(1, 64), max_size=300).map(np.array)


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        free = [capacity - sum(lengths[i] for i in pack) for pack in packs]
        fitting = [(space, pack) for pack, space in enumerate(free) if space >= lengths[index]]
        if fitting:
            packs[min(fitting)[1]].append(index)
        else:
            packs.append([index])
    return [sorted(pack) for pack in packs]


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy)
def test_best_fit_equals_the_obvious_version(lengths: np.ndarray) -> None:
    assert best_fit(lengths, 64, 1000) == slow_best_fit(lengths.tolist(), 64)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, window=st.integers(1, 50))
def test_best_fit_loses_nothing_and_overfills_nothing(lengths: np.ndarray, window: int) -> None:
    packs = best_fit(lengths, 64, window)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= 64 for pack in packs)
    assert all(pack[-1] // window == pack[0] // window for pack in packs), "a pack reaches over a window's end"
    assert packs == best_fit(lengths.copy(), 64, window)


def test_a_wider_window_packs_tighter() -> None:
    lengths = np.random.default_rng(0).integers(20, 600, 3000)
    narrow, wide = (best_fit(lengths, 1024, window) for window in (8, 1000))
    assert efficiency(lengths, len(wide), 1024) > 0.99 > efficiency(lengths, len(narrow), 1024)


@pytest.mark.parametrize("kind", ["best-fit", "none"])
def test_a_sample_longer_than_a_pack_is_an_error(kind: str) -> None:
    with pytest.raises(
        DataError, match=r"sample 1 has 65 tokens and does not fit a packed sequence of 64 \(2 such samples\)"
    ):
        plan_packing(np.array([3, 65, 64, 70]), kind, 64, 8)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 200), max_size=60).map(np.array), capacity=st.integers(1, 70))
def test_concatenate_covers_every_token_once_in_order(lengths: np.ndarray, capacity: int) -> None:
    layout = concatenate(lengths, capacity)
    packs = [layout.pack(number) for number in range(len(layout))]
    tokens = [(document, i) for pack in packs for document, start, stop in pack for i in range(start, stop)]
    assert tokens == [(document, i) for document, length in enumerate(lengths) for i in range(length)]
    sizes = [sum(stop - start for _, start, stop in pack) for pack in packs]
    assert all(size == capacity for size in sizes[:-1])
    assert not sizes or 0 < sizes[-1] <= capacity


def test_a_document_cut_by_a_border_goes_on_in_the_next_pack() -> None:
    layout = concatenate(np.array([3, 6, 1]), 4)
    assert [layout.pack(number) for number in range(3)] == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 5)], [(1, 5, 6), (2, 0, 1)]]


def test_layouts_of_whole_samples() -> None:
    layout = plan_packing(np.array([3, 1, 2, 4]), "best-fit", 5, 100)
    assert [layout.pack(number) for number in range(len(layout))] == [[(1, 0, 1), (3, 0, 4)], [(0, 0, 3), (2, 0, 2)]]
    assert len(plan_packing(np.array([3, 1, 2, 4]), "none", 5, 100)) == 4
    assert len(plan_packing(np.array([], dtype=np.int64), "best-fit", 5, 100)) == 0


def test_none_gives_each_sample_its_own_pack() -> None:
    layout = plan_packing(np.array([3, 1, 2]), "none", 4, 100)
    assert [layout.pack(number) for number in range(len(layout))] == [[(0, 0, 3)], [(1, 0, 1)], [(2, 0, 2)]]


def test_efficiency_counts_the_room() -> None:
    assert efficiency(np.array([3, 5]), 2, 8) == 0.5
    assert efficiency(np.array([]), 0, 8) == 1.0
