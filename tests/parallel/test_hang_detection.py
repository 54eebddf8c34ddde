"""What a watchdog does when, and what it says: a pure function, so no process waits here and no clock is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from danlu.parallel.flight_recorder import PendingCollective, ProcessState
from danlu.parallel.hang_detection import (
    Action,
    ExitProcess,
    HangReport,
    InquiriesCounted,
    Limits,
    Looked,
    Observation,
    Print,
    RepliesCollected,
    Reply,
    StartInquiry,
    WatchState,
    hang_message,
    transition,
)


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
REPORT = HangReport(SUM, MESSAGE, deadline_s=140.0)
HANGS = WatchState(SUM, 100.0, REPORT, SUM.key, inquiries_answered=1)


def late(elapsed_s: float) -> PendingCollective:
    return replace(SUM, elapsed_s=elapsed_s)


@pytest.mark.parametrize(
    ("state", "observation", "after", "actions"),
    [
        # A look: the report stays while its collective is pending, and goes with it.
        (WatchState(), Looked(None, 100.0), WatchState(None, 100.0), []),
        (WatchState(), Looked(SUM, 100.0), WatchState(SUM, 100.0), []),
        (HANGS, Looked(late(50.0), 104.5), replace(HANGS, pending=late(50.0), looked_at_s=104.5), []),
        (
            HANGS,
            Looked(None, 139.0),
            replace(HANGS, pending=None, looked_at_s=139.0, report=None),
            [Print("the collective all_reduce is over, and the run goes on")],
        ),
        (
            HANGS,
            Looked(NEXT, 139.0),
            replace(HANGS, pending=NEXT, looked_at_s=139.0, report=None),
            [Print("the collective all_reduce is over, and the run goes on")],
        ),
        # Its time is up: in another collective the run goes on, in none it has failed, which the report explains.
        (HANGS, Looked(NEXT, 140.0), replace(HANGS, pending=NEXT, looked_at_s=140.0, report=None), []),
        (HANGS, Looked(None, 140.0), replace(HANGS, pending=None, looked_at_s=140.0), []),
        # Inquiries: one is started when patience ends, and any new one is answered.
        (WatchState(late(44.9)), InquiriesCounted(0), WatchState(late(44.9)), []),
        (WatchState(late(45.0)), InquiriesCounted(0), WatchState(late(45.0)), [StartInquiry()]),
        (WatchState(None), InquiriesCounted(1), WatchState(None), [Reply(1, 1)]),
        (WatchState(late(45.0)), InquiriesCounted(3), WatchState(late(45.0)), [Reply(1, 3)]),
        (HANGS, InquiriesCounted(1), HANGS, []),
        (HANGS, InquiriesCounted(2), HANGS, [Reply(2, 2)]),
        # Replies make the report of a process that waits, and are printed once for each collective.
        (
            WatchState(SUM, 100.0),
            RepliesCollected(1, REPLIES),
            WatchState(SUM, 100.0, HangReport(SUM, MESSAGE, 100.0 + 90.0 - 45.2 - 4.5), SUM.key, 1),
            [Print(MESSAGE)],
        ),
        (
            WatchState(None, 100.0),
            RepliesCollected(1, REPLIES),
            WatchState(None, 100.0, None, SUM.key, 1),
            [Print(MESSAGE)],
        ),
        (HANGS, RepliesCollected(2, REPLIES), replace(HANGS, inquiries_answered=2), []),
        (
            HANGS,
            RepliesCollected(2, {0: process("a", NEXT)}),
            replace(HANGS, inquiries_answered=2, printed=NEXT.key),
            [Print(hang_message({0: process("a", NEXT)}, 90.0))],
        ),
        (WatchState(SUM), RepliesCollected(1, {0: process("a"), 1: None}), WatchState(SUM, inquiries_answered=1), []),
        # The process ends where torch has not ended it, with the report if there is one.
        (replace(HANGS, pending=late(94.5)), InquiriesCounted(1), replace(HANGS, pending=late(94.5)), []),
        (
            replace(HANGS, pending=late(94.6)),
            InquiriesCounted(1),
            replace(HANGS, pending=late(94.6)),
            [ExitProcess(MESSAGE)],
        ),
        (
            WatchState(late(95.0), 100.0),
            RepliesCollected(1, {0: None}),
            WatchState(late(95.0), 100.0, inquiries_answered=1),
            [ExitProcess("rank 0 waited in all_reduce of 3x5 for 95 s")],
        ),
        (
            WatchState(late(95.0), 100.0),
            RepliesCollected(1, REPLIES),
            WatchState(late(95.0), 100.0, HangReport(late(95.0), MESSAGE, 90.5), SUM.key, 1),
            [Print(MESSAGE), ExitProcess(MESSAGE)],
        ),
    ],
)
def test_transition(state: WatchState, observation: Observation, after: WatchState, actions: list[Action]) -> None:
    found, taken = transition(state, observation, LIMITS, rank=0)
    assert list(taken) == actions
    assert replace(found, report=None) == replace(after, report=None)
    assert (found.report is None) == (after.report is None)
    if found.report is not None and after.report is not None:
        assert (found.report.collective, found.report.message) == (after.report.collective, after.report.message)
        assert found.report.deadline_s == pytest.approx(after.report.deadline_s)
