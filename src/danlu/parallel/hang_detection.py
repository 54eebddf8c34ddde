"""A state machine that decides when a collective hangs and what is reported; `parallel.watchdog` drives it.

`transition` is a pure function of a watchdog's state and its newest observation. A collective that has been pending for
most of the time that it may take starts an inquiry; every process replies to it with its `ProcessState`, and the
replies make the report: the ranks that wait, where and in which collective, and those that never came to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class WatchState:
    """The state of a watchdog, from which `transition` goes on.

    Without a report the process makes progress; with one it hangs in `report.collective`, or that has failed.
    """

    pending: PendingCollective | None = None  # at the last look
    looked_at_s: float = 0.0  # monotonic; when that was
    report: HangReport | None = None
    printed: tuple[str, int, str] | None = None  # key of the collective that the last printed message is about
    inquiries_answered: int = 0


@dataclass(frozen=True)
class Looked:
    """Observed: the pending collective in the flight recorder, or None."""

    pending: PendingCollective | None
    now_s: float  # monotonic


@dataclass(frozen=True)
class InquiriesCounted:
    """Observed: how many inquiries the processes have started."""

    count: int


@dataclass(frozen=True)
class RepliesCollected:
    """Observed: the processes' replies to the newest of `count` inquiries; None for no reply."""

    count: int
    states: Mapping[int, ProcessState | None]


@dataclass(frozen=True)
class Print:
    """Do: show a message to the user, on rank 0."""

    message: str


@dataclass(frozen=True)
class StartInquiry:
    """Do: ask all processes where they are; then the inquiries are counted again."""


@dataclass(frozen=True)
class Reply:
    """Do: reply to inquiries `first` to `last`, and collect the replies to `last`."""

    first: int
    last: int


@dataclass(frozen=True)
class ExitProcess:
    """Do: end this process with an error; its main thread may never come back."""

    message: str


Observation = Looked | InquiriesCounted | RepliesCollected
Action = Print | StartInquiry | Reply | ExitProcess


def transition(
    state: WatchState, observation: Observation, limits: Limits, rank: int
) -> tuple[WatchState, tuple[Action, ...]]:
    """Returns the state after an observation and the actions to take, in order; reads no clock and changes nothing.

    A look is observed as `Looked`, then `InquiriesCounted`, and where there is a new inquiry `RepliesCollected`.
    """
    match observation:
        case Looked(pending, now_s):
            return _after_look(replace(state, pending=pending, looked_at_s=now_s))
        case InquiriesCounted(count):
            if count > state.inquiries_answered:
                # Several processes may have started one at once, and each of them waits for replies to its own.
                return state, (Reply(state.inquiries_answered + 1, count),)
            if state.pending is not None and state.pending.elapsed_s >= limits.patience_s and state.report is None:
                return state, (StartInquiry(),)
            return state, _exit(state, limits, rank)
        case RepliesCollected(count, states):
            state, actions = _after_replies(replace(state, inquiries_answered=count), states, limits)
            return state, (*actions, *_exit(state, limits, rank))


def _after_look(state: WatchState) -> tuple[WatchState, tuple[Action, ...]]:
    """Ends the report where its collective is over or its time is up."""
    report, pending = state.report, state.pending
    if report is None or (pending is not None and pending.key == report.collective.key):
        return state, ()
    if state.looked_at_s < report.deadline_s:
        over = f"the collective {report.collective.operation} is over, and the run goes on"
        return replace(state, report=None), (Print(over),)
    # Its time is up. In no other collective it has failed, and the report is what there is to say of that.
    return (state if pending is None else replace(state, report=None)), ()


def _after_replies(
    state: WatchState, states: Mapping[int, ProcessState | None], limits: Limits
) -> tuple[WatchState, tuple[Action, ...]]:
    """The report that the replies to an inquiry make."""
    longest, pending = longest_pending(states), state.pending
    if longest is None:
        return state, ()
    message = hang_message(states, limits.timeout_s)
    # The first replies make the report where two inquiries were started at once.
    if pending is not None and state.report is None:
        deadline_s = state.looked_at_s + limits.timeout_s - pending.elapsed_s - limits.interval_s
        state = replace(state, report=HangReport(pending, message, deadline_s))
    is_news = longest.key != state.printed
    return replace(state, printed=longest.key), (Print(message),) if is_news else ()


def _exit(state: WatchState, limits: Limits, rank: int) -> tuple[Action, ...]:
    """Ends a process that torch has not ended long after a collective's time was up."""
    pending = state.pending
    if pending is None or pending.elapsed_s <= limits.exit_after_s:
        return ()
    alone = f"{format_ranks([rank])} waited in {pending} for {pending.elapsed_s:.0f} s"
    return (ExitProcess(alone if state.report is None else state.report.message),)
