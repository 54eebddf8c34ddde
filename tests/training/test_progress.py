from __future__ import annotations

import io
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from danlu.core.types import StepMetrics
from danlu.training.progress import BarProgress, Eta, LineProgress, evaluation_line, event_line, numbers, progress_on
from danlu.training.units import format_bytes, format_duration


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


def test_the_losses_of_sources_stand_beside_the_loss_of_all() -> None:
    values = {"loss": 2.0, "loss/a\x1b[2J.jsonl": 1.5, "loss/b.jsonl": 2.5, "tokens": 10, "s": 0.1}
    assert evaluation_line(4, values) == (
        "step 4 evaluation: loss 2.000, loss/a\\x1b[2J.jsonl 1.5, loss/b.jsonl 2.5, 10 tokens in 0.1 s"
    )


def test_a_plain_line() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = LineProgress(stream, total=90, done=9, clock=clock)
    clock.now += 1
    lines.step(metrics(10))
    lines.evaluation(10, {"loss": 3.14159, "perplexity": 23.14069, "accuracy": 0.3121, "tokens": 1712, "s": 0.0536})
    lines.event(10, "sample", prompt="Once\x1b[2J", text="upon\na time")
    lines.close()
    assert stream.getvalue() == (
        "step 10/90 loss 3.214 grad 0.91 lr 2.0e-04 4,312 tok/s 1.02 GiB eta 0:01:20\n"
        "step 10 evaluation: loss 3.142, perplexity 23.14, accuracy 31.2%, 1,712 tokens in 0.1 s\n"
        "step 10 sample: Once\\x1b[2J\n  -> upon\n     a time\n"
    )


def test_what_leads_stands_before_the_loss() -> None:
    stream, extra = io.StringIO(), {"reward": 0.5}
    rest = "loss 3.214 grad 0.91 lr 2.0e-04 4,312 tok/s 1.02 GiB"
    progress = progress_on(stream, total=9, lead=lambda values: f"reward {values['reward']} ")
    progress.step(replace(metrics(1), extra=extra))
    assert stream.getvalue().startswith(f"step 1/9 reward 0.5 {rest}")
    assert numbers(replace(metrics(1), extra=extra)) == rest


def test_every_step_is_shown_where_it_is_asked_for() -> None:
    clock = Clock()
    for kind, stream in ((LineProgress, io.StringIO()), (BarProgress, Terminal())):
        progress = kind(stream, total=30, every_step=True, clock=clock)
        for step in range(1, 31):
            progress.step(metrics(step))
        progress.close()
        assert re.findall(r"step (\d+)/30 loss", stream.getvalue()) == [str(step) for step in range(1, 31)]


def test_images_are_not_told_as_tokens() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = LineProgress(stream, total=90, counted="images", clock=clock)
    clock.now += 1
    lines.step(metrics(1))
    lines.evaluation(1, {"tokens": 500})
    assert "4,312 images/s" in stream.getvalue() and stream.getvalue().endswith("evaluation: 500 images\n")
    assert "tok" not in stream.getvalue()


@pytest.mark.parametrize(
    ("event", "values", "line"),
    [
        ("overflow", {"before": 65536.0, "after": 32768.0},
         "fp16 overflow, update skipped, loss scale 65,536 -> 32,768"),
        ("loss_scale", {"before": 0.5, "after": 1.0}, "no fp16 overflow for a while, loss scale 0.5 -> 1"),
        ("spike", {"policy": "skip", "reason": "loss 9 is high"}, "spike: loss 9 is high; watch.policy: skip"),
        ("rewind", {"back_to": 4, "packs_left_out": 8},
         "back to the checkpoint of step 4; packed sequences skipped so far: 8"),
        ("early_stop", {"best_loss": 3.25, "evaluations": 3},
         "early stop: 3 evaluations in a row were no better than 3.2500"),
        ("early_stop", {"best_accuracy": 0.75, "evaluations": 3},
         "early stop: 3 evaluations in a row were no better than accuracy 0.7500"),
    ],
)  # fmt: skip
def test_events_in_words(event: str, values: Mapping[str, Any], line: str) -> None:
    assert event_line(7, event, values) == f"step 7: {line}"


def test_an_unknown_event_shows_its_values() -> None:
    assert event_line(7, "surprise", {"size": 1.23456, "what": "x"}) == "step 7 surprise: size 1.235, what x"
    assert event_line(7, "surprise", {}) == "step 7 surprise"


def test_fast_steps_do_not_flood_and_the_last_is_always_shown() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = LineProgress(stream, total=100, clock=clock)
    for step in range(1, 101):
        clock.now += 0.5
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
    bar.event(3, "spike", policy="warn", reason="loss 9.5 is high")
    bar.step(metrics(3))
    bar.close()
    assert "step 3: spike: loss 9.5 is high; watch.policy: warn" in stream.getvalue()
    assert "3/5" in stream.getvalue()


def test_a_bar_has_no_thread_of_its_own() -> None:
    before = threading.enumerate()
    bar = BarProgress(Terminal(), total=100)
    try:
        assert threading.enumerate() == before
    finally:
        bar.close()


def test_a_bar_leaves_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    clock, stream = Clock(), Terminal()
    bar = BarProgress(stream, total=100, clock=clock)
    for step in range(1, 101):
        clock.now += 1
        bar.step(metrics(step))
    bar.close()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())
    left = [int(number) for number in re.findall(r"step (\d+)/100 loss 3.214", plain)]
    assert left == [30, 60, 90]


def test_on_80_columns_the_count_and_the_numbers_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    bar = BarProgress(stream, total=1291)
    bar.step(metrics(99))
    bar.close()
    assert "99/1291" in stream.getvalue() and "…" not in stream.getvalue()
    assert numbers(metrics(99)) in stream.getvalue()


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
