"""Tables of measured seconds: exact where they were measured, rising between, and honest beyond."""

from __future__ import annotations

import itertools

import pytest

from danlu.planning.measured_table import Seconds, Table

AXES = ((1, 8, 64), (16, 256), (16, 128, 1024))


def seconds_of(m: float, n: float, k: float) -> float:
    return 1e-6 + m * n * k / 1e9


PRODUCTS = Table.rising(AXES, [seconds_of(*size) for size in itertools.product(*AXES)])


def test_measured_sizes_are_exact() -> None:
    for size in itertools.product(*AXES):
        found = PRODUCTS.at(*size)
        assert found == seconds_of(*size) and not found.extrapolated


def test_between_them_work_and_a_constant_are_exact_too() -> None:
    for size in ((2, 17, 33), (63, 255, 1000), (8, 100, 16)):
        found = PRODUCTS.at(*size)
        assert found == pytest.approx(seconds_of(*size), rel=1e-9) and not found.extrapolated
    assert PRODUCTS.at(2, 17, 33) != pytest.approx(seconds_of(2, 17, 34), rel=1e-9)


def falls(table: Table) -> bool:
    """Whether some larger size takes less time than a smaller one."""
    steps = (1, 3, 8, 20, 64, 100), (8, 16, 90, 256, 300), (16, 50, 128, 700, 1024, 2000)
    for axis in range(3):
        for fixed in itertools.product(*(steps[other] for other in range(3) if other != axis)):
            values = [table.at(*fixed[:axis], size, *fixed[axis:]) for size in steps[axis]]
            if values != sorted(values):
                return True
    return False


@pytest.mark.parametrize("every", [2, 3, 6])
def test_a_larger_size_is_never_faster(every: int) -> None:
    sizes = list(itertools.product(*AXES))
    # As measured: noise makes some sizes slower than larger ones.
    noisy = [seconds_of(*size) * (50 if number % every == 0 else 1) for number, size in enumerate(sizes)]
    table = Table.rising(AXES, noisy)
    assert falls(Table(AXES, tuple(noisy))) and not falls(table)
    assert all(rising <= measured for rising, measured in zip(table.seconds, noisy, strict=True))
    assert table.seconds[-1] == noisy[-1]


def test_beyond_the_largest_size_the_rate_stays_and_is_said_to_be_extrapolated() -> None:
    largest = PRODUCTS.at(64, 256, 1024)
    beyond = PRODUCTS.at(128, 256, 3072)
    assert beyond.extrapolated and beyond == pytest.approx(6 * largest)
    below = PRODUCTS.at(1, 1, 16)
    assert below.extrapolated and below == PRODUCTS.at(1, 16, 16)
    assert type(beyond + 1) is float


@pytest.mark.parametrize("power", [1, 1.5, 2])
def test_the_length_of_attention_counts_by_a_power_and_squared_at_its_end(power: float) -> None:
    table = Table.rising(
        ((64, 512), (2, 8)), [heads * length**power / 1e9 for length in (64, 512) for heads in (2, 8)], (2, 1)
    )
    assert table.at(200, 3) == pytest.approx(3 * 200**power / 1e9)
    assert table.at(1024, 2) == pytest.approx(4 * table.at(512, 2))
    straight = Table(table.axes, table.seconds)
    assert power == 1 or straight.at(200, 3) != pytest.approx(table.at(200, 3), rel=0.1)


def test_a_table_comes_back_as_it_was_written() -> None:
    assert Table.from_json(PRODUCTS.to_json()) == PRODUCTS


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [1.0]},
        {"seconds": [1.0, float("nan")]},
        {"seconds": [1.0, -1.0]},
        {"axes": [[8, 4]]},
        {"axes": [[0, 4]]},
        {"axes": [[4, 4]]},
        {"axes": []},
        {"axes": [["a", "b"]]},
        {"powers": [1, 2]},
        {"powers": None},
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, object]) -> None:
    content = {"axes": [[4, 8]], "seconds": [1.0, 2.0], "powers": []}
    assert Table.from_json(content).at(6) == Seconds(1.5)
    with pytest.raises((ValueError, TypeError)):
        Table.from_json(content | change)
