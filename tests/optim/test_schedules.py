from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from danlu.optim.schedules import multiplier
from danlu.recipe.sections import Schedule

KINDS = ["constant", "linear", "cosine", "wsd", "inverse-sqrt"]
shares = st.floats(0, 0.99)
settings = st.one_of(st.integers(1, 60), shares)


def curve(section: Schedule, total: int) -> list[float]:
    return [multiplier(step, total, section) for step in range(1, total + 1)]


@given(st.sampled_from(KINDS), st.integers(1, 60), st.one_of(settings, st.just(0)), settings, st.floats(0, 1))
def test_rises_to_one_then_never_rises_and_stays_within_bounds(
    kind: str, total: int, warmup: float, decay: float, floor: float
) -> None:
    section = Schedule(kind=kind, warmup=warmup, decay=decay, floor=floor)
    assume(not section.problems(total))
    values = curve(section, total)
    peak = max(1, section.warmup_steps(total))
    assert values[:peak] == [step / peak for step in range(1, peak + 1)]
    after = values[peak - 1 :]
    assert after[0] == 1.0
    assert all(later <= earlier + 1e-15 for earlier, later in pairwise(after))
    assert all(0 <= value <= 1 for value in values)
    if kind in ("linear", "cosine", "wsd") and total > peak and not (kind == "wsd" and section.decay_steps(total) == 0):
        assert values[-1] == floor
        assert min(after) >= min(floor, 1.0) - 1e-15


def test_linear_by_hand() -> None:
    section = Schedule(kind="linear", warmup=2, floor=0.1)
    assert curve(section, 5) == pytest.approx([0.5, 1.0, 0.7, 0.4, 0.1])


def test_cosine_is_half_way_in_the_middle() -> None:
    section = Schedule(kind="cosine", warmup=1, floor=0.2)
    values = curve(section, 9)
    assert values[4] == pytest.approx(0.6)
    assert values[2] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_wsd_is_flat_then_one_minus_the_square_root() -> None:
    section = Schedule(kind="wsd", warmup=0.1, decay=4, floor=0.0)
    values = curve(section, 20)
    assert values[1:16] == [1.0] * 15
    assert values[16:] == pytest.approx([1 - math.sqrt(n / 4) for n in (1, 2, 3, 4)])


def test_wsd_without_decay_stays_at_the_peak() -> None:
    assert curve(Schedule(kind="wsd", warmup=0, decay=0.0), 5) == [1.0] * 5


def test_inverse_sqrt_halves_at_four_times_the_warm_up() -> None:
    values = curve(Schedule(kind="inverse-sqrt", warmup=5), 20)
    assert values[4] == 1.0 and values[19] == 0.5


def test_a_single_step_is_taken_at_the_peak() -> None:
    assert [multiplier(1, 1, Schedule(kind=kind, floor=0.0)) for kind in KINDS] == [1.0] * 5


def test_warm_up_and_decay_must_fit_into_the_run() -> None:
    assert Schedule(warmup=11).problems(10) == [
        (
            "warmup",
            "a warm-up of 11 steps is longer than the run of 10. Use at most 10, or a share of the run such as 0.05",
        )
    ]
    assert Schedule(kind="wsd", warmup=4, decay=7).problems(10) == [
        (
            "decay",
            "warm-up (4 steps) and decay (7) are longer than the run of 10. "
            "Use at most 6 steps of decay, or less warm-up",
        )
    ]
    assert Schedule(kind="wsd", warmup=0.6, decay=0.5).problems(None) == [
        ("warmup", "warm-up 0.6 and decay 0.5 together are more than the whole run (1.0)")
    ]
    assert Schedule(kind="cosine", warmup=4, decay=7).problems(10) == []
    assert (
        Schedule(kind="wsd", warmup=0.5, decay=0.5).problems(3) == []
    )  # two steps each: the decay begins a step later
