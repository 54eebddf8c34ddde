"""What a watchdog does when, and what it says: no process waits here and no clock is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from danlu.parallel.flight_recorder import PendingCollective, ProcessState
from danlu.parallel.hang_detection import HangDetector, HangReport, Limits, hang_message
from danlu.parallel.watchdog import Watchdog


def process(phase: str, pending: PendingCollective | None = None, line: str = "") -> ProcessState:
    return ProcessState(pending, phase, line)


SUM = PendingCollective("all_reduce", "0", (0, 1, 2, 3), 7, ((3, 5),), 45.2)
END = ". A collective fails after 90 s (parallel.timeout_s)"


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (
            {
                0: process("layers.3.mlp (backward, step 17)", SUM),
                1: process("layers.2.attention (forward, step 17)", line="take (danlu/data/stream.py:88)"),
                2: process("layers.3.mlp (backward, step 17)", SUM),
                3: process("layers.3.mlp (backward, step 17)", SUM),
            },
            "ranks 0, 2 and 3 have waited for 45 s in all_reduce of 3x5, at layers.3.mlp (backward, step 17); rank 1 "
            "never came: it is at layers.2.attention (forward, step 17), in take (danlu/data/stream.py:88)",
        ),
        (
            {
                0: process("a", SUM),
                1: None,
                2: process("b", SUM),
                3: process("c", PendingCollective("barrier", "1", (2, 3), 1, (), 3)),
            },
            "rank 0 has waited for 45 s in all_reduce of 3x5, at a, rank 2 at b; rank 1 does not answer: it is "
            "stopped, or gone; rank 3 waits in barrier instead, at c",
        ),
        (
            {rank: process("a", SUM) for rank in range(4)},
            "ranks 0-3 have waited for 45 s in all_reduce of 3x5, at a; all of them are there, so what they send does "
            "not arrive",
        ),
        (  # a group of two: the others are not waited for
            {
                0: process("x"),
                1: process("y"),
                2: process("", PendingCollective("send", "1", (2, 3), 1, ((),), 9)),
                3: process(""),
            },
            "rank 2 has waited for 9 s in send of one number, at somewhere; rank 3 never came: it is at somewhere",
        ),
    ],
)
def test_message(states: dict[int, ProcessState | None], message: str) -> None:
    assert hang_message(states, 90.0) == message + END


@pytest.mark.parametrize(
    ("timeout_s", "patience_s", "interval_s", "replies_s", "exit_after_s"),
    [(600.0, 540.0, 5.0, 36.0, 605.0), (90.0, 45.0, 4.5, 27.0, 94.5), (8.0, 4.0, 0.4, 2.4, 10.0)],
)
def test_limits(timeout_s: float, patience_s: float, interval_s: float, replies_s: float, exit_after_s: float) -> None:
    limits = Limits(timeout_s)
    measured = limits.patience_s, limits.interval_s, limits.replies_s, limits.exit_after_s
    assert measured == pytest.approx((patience_s, interval_s, replies_s, exit_after_s))


LIMITS = Limits(90.0)
NEXT = replace(SUM, number=8, elapsed_s=1.0)
REPLIES = {0: process("a", SUM), 1: process("b")}
MESSAGE = hang_message(REPLIES, 90.0)
OVER = "the collective all_reduce is over, and the run goes on"
REPORT = HangReport(SUM, MESSAGE, deadline_s=140.0)
HANGS = HangDetector(LIMITS, 0, SUM, 100.0, REPORT, SUM.key, inquiries_answered=1)


def detector(pending: PendingCollective | None = None, looked_at_s: float = 0.0, **fields: Any) -> HangDetector:
    return HangDetector(LIMITS, 0, pending, looked_at_s, **fields)


def late(elapsed_s: float) -> PendingCollective:
    return replace(SUM, elapsed_s=elapsed_s)


def check(found: HangDetector, after: HangDetector) -> None:
    assert replace(found, report=None) == replace(after, report=None)
    assert (found.report is None) == (after.report is None)
    if found.report is not None and after.report is not None:
        assert (found.report.collective, found.report.message) == (after.report.collective, after.report.message)
        assert found.report.deadline_s == pytest.approx(after.report.deadline_s)


@pytest.mark.parametrize(
    ("before", "pending", "now_s", "after", "message"),
    [
        # The report stays while its collective is pending, and goes with it.
        (detector(), None, 100.0, detector(None, 100.0), None),
        (detector(), SUM, 100.0, detector(SUM, 100.0), None),
        (HANGS, late(50.0), 104.5, replace(HANGS, pending=late(50.0), looked_at_s=104.5), None),
        (HANGS, None, 139.0, replace(HANGS, pending=None, looked_at_s=139.0, report=None), OVER),
        (HANGS, NEXT, 139.0, replace(HANGS, pending=NEXT, looked_at_s=139.0, report=None), OVER),
        # Its time is up: in another collective the run goes on, in none it has failed, which the report explains.
        (HANGS, NEXT, 140.0, replace(HANGS, pending=NEXT, looked_at_s=140.0, report=None), None),
        (HANGS, None, 140.0, replace(HANGS, pending=None, looked_at_s=140.0), None),
    ],
)
def test_a_look(
    before: HangDetector, pending: PendingCollective | None, now_s: float, after: HangDetector, message: str | None
) -> None:
    found = replace(before)
    assert found.looked(pending, now_s) == message
    check(found, after)


def test_an_inquiry_is_started_when_patience_ends_and_once() -> None:
    assert not detector(late(44.9)).starts_inquiry
    assert detector(late(45.0)).starts_inquiry
    assert not detector(None).starts_inquiry
    assert not replace(HANGS, pending=late(60.0)).starts_inquiry


@pytest.mark.parametrize(
    ("before", "inquiries", "states", "after", "message"),
    [
        # Replies make the report of a process that waits, and are printed once for each collective.
        (
            detector(SUM, 100.0),
            1,
            REPLIES,
            detector(
                SUM,
                100.0,
                report=HangReport(SUM, MESSAGE, 100.0 + 90.0 - 45.2 - 4.5),
                printed=SUM.key,
                inquiries_answered=1,
            ),
            MESSAGE,
        ),
        (detector(None, 100.0), 1, REPLIES, detector(None, 100.0, printed=SUM.key, inquiries_answered=1), MESSAGE),
        (HANGS, 2, REPLIES, replace(HANGS, inquiries_answered=2), None),
        (
            HANGS,
            2,
            {0: process("a", NEXT)},
            replace(HANGS, inquiries_answered=2, printed=NEXT.key),
            hang_message({0: process("a", NEXT)}, 90.0),
        ),
        (detector(SUM), 1, {0: process("a"), 1: None}, detector(SUM, inquiries_answered=1), None),
    ],
)
def test_replies(
    before: HangDetector,
    inquiries: int,
    states: dict[int, ProcessState | None],
    after: HangDetector,
    message: str | None,
) -> None:
    found = replace(before)
    assert found.replied(inquiries, states) == message
    check(found, after)


def test_the_process_ends_where_torch_has_not_ended_it_with_the_report_if_there_is_one() -> None:
    assert replace(HANGS, pending=late(94.5)).exit_message() is None
    assert replace(HANGS, pending=late(94.6)).exit_message() == MESSAGE
    assert detector(None).exit_message() is None
    silent = detector(late(95.0), 100.0)
    assert silent.replied(1, {0: None}) is None
    assert silent.exit_message() == "rank 0 waited in all_reduce of 3x5 for 95 s"
    reported = detector(late(95.0), 100.0)
    assert reported.replied(1, REPLIES) == MESSAGE == reported.exit_message()
    assert reported.report is not None and reported.report.deadline_s == pytest.approx(90.5)


class Store:
    """Counts inquiries, and keeps what the processes reply; of another rank nothing comes but what the test puts."""

    def __init__(self, asked: int = 0) -> None:
        self.asked, self.values = asked, dict[str, str]()

    def add(self, key: str, number: int) -> int:
        self.asked += number
        return self.asked

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.mark.parametrize(
    ("before", "asked", "replied"),
    [
        (detector(late(44.9)), 0, []),
        (detector(late(45.0)), 0, [1]),  # starts it
        (detector(None), 1, [1]),
        (detector(late(45.0)), 3, [1, 2, 3]),  # starts none beside those that are there
        (HANGS, 1, []),
        (HANGS, 2, [2]),
    ],
)
def test_each_inquiry_is_answered_once(
    before: HangDetector, asked: int, replied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danlu.parallel.watchdog.pending_collective", lambda: before.pending)
    monkeypatch.setattr("danlu.parallel.watchdog.time.monotonic", lambda: 100.0)
    store, said = Store(asked), list[str]()
    watchdog = Watchdog(store, 0, 1, 90.0, log=said.append, end=said.append)
    watchdog._detector = replace(before)
    watchdog._look()
    assert sorted(store.values) == [f"hang/{inquiry}/0" for inquiry in replied]
    assert store.asked == max(asked, *replied) if replied else store.asked == asked
    assert watchdog._detector.inquiries_answered == max([before.inquiries_answered, *replied])
