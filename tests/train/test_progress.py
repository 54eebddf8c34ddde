from __future__ import annotations

import io

import pytest

from danlu.train.progress import BarProgress, Eta, LineProgress, progress_on
from danlu.train.units import format_bytes, format_duration
from danlu.types import StepMetrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step, 3.2141, 0.9123, 2e-4, 100, 80, 4312.4, int(1.02 * 2**30))


def test_a_plain_line() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = LineProgress(stream, total=90, done=9, clock=clock)
    clock.now += 1
    lines.step(metrics(10))
    lines.evaluation(10, {"loss": 3.14159, "tokens": 12, "perplexity": 23.14069})
    lines.event(10, "overflow", scale=32768.0)
    lines.event(10, "sample", prompt="Once", text="upon a time")
    lines.close()
    assert stream.getvalue() == (
        "step 10/90 loss 3.214 grad 0.91 lr 2.0e-04 4,312 tok/s 1.02 GiB eta 0:01:20\n"
        "step 10 evaluation: loss 3.142 tokens 12 perplexity 23.14\n"
        "step 10 overflow: scale 3.277e+04\n"
        "step 10 sample: Once\n  -> upon a time\n"
    )


def test_fast_steps_do_not_flood_and_the_last_is_always_shown() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = LineProgress(stream, total=100, clock=clock)
    for step in range(1, 101):
        clock.now += 0.1
        lines.step(metrics(step))
    shown = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown[0] == 1
    assert shown[-1] == 100
    assert 10 <= len(shown) <= 12


def test_remaining_time_leaves_the_slow_first_step_out_and_follows_a_change_of_pace() -> None:
    clock = Clock()
    eta = Eta(total=1000, done=0, clock=clock)
    clock.now += 60  # compiling
    assert eta.after(1) == pytest.approx(60 * 999)
    clock.now += 2
    assert eta.after(2) == pytest.approx(2 * 998)
    for step in range(3, 200):
        clock.now += 1
        left = eta.after(step)
    assert left == pytest.approx(1 * 801, rel=1e-3)
    assert eta.after(150) == pytest.approx(850, rel=1e-3)  # a rewind


def test_a_terminal_gets_a_bar_and_a_file_gets_lines() -> None:
    assert isinstance(progress_on(io.StringIO(), total=5), LineProgress)
    stream = Terminal()
    bar = progress_on(stream, total=5, done=2)
    assert isinstance(bar, BarProgress)
    bar.event(3, "spike", loss=9.5)
    bar.step(metrics(3))
    bar.close()
    assert "step 3 spike: loss 9.5" in stream.getvalue()
    assert "3/5" in stream.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1234567, "1.18 MiB"), (10.5 * 2**20, "10.5 MiB"),
     (999.4 * 2**20, "999 MiB"), (1001 * 2**20, "0.98 GiB"), (3 * 2**40, "3.00 TiB")],
)  # fmt: skip
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (79.6, "0:01:20"), (3725.4, "1:02:05"), (86400 * 2 + 3661, "2d 01:01:01"), (-3, "0:00:00")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
