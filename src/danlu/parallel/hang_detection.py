"""Decides when a collective hangs and what is reported; `parallel.watchdog` asks it, and reads the clock.

A collective that has been pending for most of the time that it may take starts an inquiry; every process replies to it
with its `ProcessState`, and the replies make the report: the ranks that wait, where and in which collective, and those
that never came to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from danlu.parallel.flight_recorder import PendingCollective, ProcessState
from danlu.parallel.world import format_ranks

_LONGEST_WARNING_S = 60.0  # before a collective's time is up
_LONGEST_INTERVAL_S = 5.0
_LEAST_GRACE_S = 2.0  # for torch to fail a collective that has used its time


def hang_message(states: Mapping[int, ProcessState | None], timeout_s: float) -> str:
    """Names the ranks that wait, their collective, and the ranks that never came to it.

    states: the state of each process, by rank; None for one that does not answer. At least one of them has a pending
    collective.
    """
    longest = longest_pending(states)
    assert longest is not None, "one of them waits"
    ranks_at: dict[str, list[int]] = {}  # location -> ranks that wait there in the longest collective
    for rank, state in sorted(states.items()):
        if state is not None and state.pending is not None and state.pending.key == longest.key:
            ranks_at.setdefault(state.location, []).append(rank)
    parts = []
    for number, (location, ranks) in enumerate(ranks_at.items()):
        verb = "has" if len(ranks) == 1 else "have"
        waited = f" {verb} waited for {longest.elapsed_s:.0f} s in {longest}," if not number else ""
        parts.append(f"{format_ranks(ranks)}{waited} at {location}")
    waiting = {rank for ranks in ranks_at.values() for rank in ranks}
    absent = [
        _absence(rank, states.get(rank)) for rank in longest.members or sorted(states) if rank not in waiting
    ] or ["all of them are there, so what they send does not arrive"]
    return f"{', '.join(parts)}; {'; '.join(absent)}. A collective fails after {timeout_s:g} s (parallel.timeout_s)"


def longest_pending(states: Mapping[int, ProcessState | None]) -> PendingCollective | None:
    """The collective that any process has been in for longest; None where none is in one."""
    pending = [state.pending for state in states.values() if state is not None and state.pending is not None]
    return max(pending, key=lambda collective: collective.elapsed_s, default=None)


def _absence(rank: int, state: ProcessState | None) -> str:
    """Says where a rank is that ought to be in a collective."""
    if state is None:
        return f"{format_ranks([rank])} does not answer: it is stopped, or gone"
    if state.pending is not None:
        return f"{format_ranks([rank])} waits in {state.pending} instead, at {state.location}"
    return f"{format_ranks([rank])} never came: it is at {state.location}"


@dataclass(frozen=True)
class Limits:
    """The time limits of a watchdog; all follow from the time that a collective may take."""

    timeout_s: float  # after which a collective fails (parallel.timeout_s)

    @property
    def patience_s(self) -> float:
        """How long a collective is pending before there is an inquiry: a minute less than it may, or half of that."""
        return self.timeout_s - min(self.timeout_s / 2, _LONGEST_WARNING_S)

    @property
    def interval_s(self) -> float:
        """The seconds between two looks."""
        return min(_LONGEST_INTERVAL_S, self.patience_s / 10)

    @property
    def exit_after_s(self) -> float:
        """How long a collective is pending before the process is ended, for torch has not ended it in time."""
        return self.timeout_s + max(_LEAST_GRACE_S, self.interval_s)

    @property
    def replies_s(self) -> float:
        """How long replies are waited for: most of the time that is left, for a process may notice late."""
        return max(2.5 * self.interval_s, 0.6 * (self.timeout_s - self.patience_s))


@dataclass(frozen=True)
class HangReport:
    """A hang of this process that has been reported."""

    collective: PendingCollective
    message: str
    deadline_s: float  # monotonic; from then on the collective may have failed rather than ended well


@dataclass
class HangDetector:
    """The state that a watchdog sees its process in: it makes progress, hangs in `report.collective`, or has failed.

    A look calls `looked`; then, where there are inquiries that it has not answered, `replied`; then `exit_message`.
    Each returns a message, None where there is nothing to say.
    """

    limits: Limits
    rank: int
    pending: PendingCollective | None = None  # at the last look
    looked_at_s: float = 0.0  # monotonic; when that was
    report: HangReport | None = None
    printed: tuple[str, int, str] | None = None  # key of the collective that the last message about replies is about
    inquiries_answered: int = 0

    @property
    def starts_inquiry(self) -> bool:
        """Whether all processes are to be asked where they are."""
        pending = self.pending
        return pending is not None and pending.elapsed_s >= self.limits.patience_s and self.report is None

    def looked(self, pending: PendingCollective | None, now_s: float) -> str | None:
        """Takes up the pending collective of this moment; ends the report where its collective is over or its time is
        up, and returns the message for the user in the first case."""
        self.pending, self.looked_at_s, report = pending, now_s, self.report
        if report is None or (pending is not None and pending.key == report.collective.key):
            return None
        if now_s < report.deadline_s:
            self.report = None
            return f"the collective {report.collective.operation} is over, and the run goes on"
        # Its time is up. In no other collective it has failed, and the report is what there is to say of that.
        self.report = report if pending is None else None
        return None

    def replied(self, inquiries: int, states: Mapping[int, ProcessState | None]) -> str | None:
        """Takes up the processes' replies to the newest of so many inquiries; returns the message that they make.

        states: the replies by rank, None for no reply.
        """
        self.inquiries_answered = inquiries
        longest, pending = longest_pending(states), self.pending
        if longest is None:
            return None
        message = hang_message(states, self.limits.timeout_s)
        # The first replies make the report where two inquiries were started at once.
        if pending is not None and self.report is None:
            deadline_s = self.looked_at_s + self.limits.timeout_s - pending.elapsed_s - self.limits.interval_s
            self.report = HangReport(pending, message, deadline_s)
        is_news, self.printed = longest.key != self.printed, longest.key
        return message if is_news else None

    def exit_message(self) -> str | None:
        """The message with which this process is to be ended: torch has not, long after a collective's time was up."""
        pending = self.pending
        if pending is None or pending.elapsed_s <= self.limits.exit_after_s:
            return None
        if self.report is not None:
            return self.report.message
        return f"{format_ranks([self.rank])} waited in {pending} for {pending.elapsed_s:.0f} s"
