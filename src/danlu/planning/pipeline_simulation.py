"""The duration of a pipeline's step: simulates the lists that run, with a time for each action. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from danlu.parallel.schedules.action import Action
from danlu.parallel.schedules.dependencies import Result, needs, result
from danlu.parallel.timeline import TimelineEvent
from danlu.planning.action_times import ActionTimes

COMPUTE = ("forward", "backward", "input", "weight")
"""Kinds of actions that keep a rank busy; besides them only PipeDream's updates, which are between these."""


@dataclass(frozen=True)
class Bubble:
    """Idle and busy time of all ranks in a timeline, from the first computation of any rank to the last one.

    The update at the end of a step waits for all ranks (the gradient's norm), in every schedule alike, and is no part.
    """

    busy_s: float
    idle_s: float
    inner_idle_s: tuple[float, ...]
    """Idle time of each rank between its own first and last computation."""

    @property
    def ratio(self) -> float:
        """Idle time over busy time, as papers count it."""
        return self.idle_s / self.busy_s if self.busy_s else 0.0


def bubble(events: Iterable[TimelineEvent]) -> Bubble:
    """The bubble of a simulated or measured timeline."""
    by_rank = defaultdict(list)
    for event in events:
        is_busy = event.kind in COMPUTE or (event.kind == "update" and event.micro is not None)
        if is_busy and event.end_s > event.start_s:
            by_rank[event.rank].append(event)
    busy = {rank: sum(event.end_s - event.start_s for event in events) for rank, events in by_rank.items()}
    first = {rank: min(event.start_s for event in events) for rank, events in by_rank.items()}
    last = {rank: max(event.end_s for event in events) for rank, events in by_rank.items()}
    whole = max(last.values(), default=0.0) - min(first.values(), default=0.0)
    busy_s = sum(busy.values())
    inner = tuple(last[rank] - first[rank] - busy[rank] for rank in sorted(by_rank))
    return Bubble(busy_s, len(by_rank) * whole - busy_s, inner)


def simulate(lists: Sequence[Sequence[Action]], times: ActionTimes | None = None) -> list[TimelineEvent]:
    """The events of a step in which every rank goes through its list as early as it can.

    Messages cost a rank no time: a send begins where it stands in the list, or when the message before it in the same
    direction between the same ranks has arrived, and only the computation that uses a message waits for it.

    Raises AssertionError where ranks wait for each other for ever: a list is wrong, which no recipe can cause.
    """
    simulation = _Simulation(lists, times or ActionTimes())
    while simulation.advance():
        pass
    return simulation.events


class _Simulation:
    """The state of a simulation: each rank's position in its list, and the times of results."""

    def __init__(self, lists: Sequence[Sequence[Action]], times: ActionTimes) -> None:
        self.events: list[TimelineEvent] = []
        self._lists = lists
        self._times = times
        self._num_chunks = len({action.chunk for actions in lists for action in actions if action.kind == "forward"})
        self._position = [0] * len(lists)
        self._free = [0.0] * len(lists)  # when each rank has done all before its position
        self._reduced = [0.0] * len(lists)  # when it has summed what it was to sum until then
        self._ready: dict[tuple[int, Result], float] = {}  # when a rank has a result
        self._transfers: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)  # by (from, to)
        self._received: dict[tuple[int, int], int] = defaultdict(int)  # receives that were reached, likewise

    def advance(self) -> bool:
        """Takes every rank as far as it can go; False once all have ended."""
        advanced = False
        for rank, actions in enumerate(self._lists):
            while self._position[rank] < len(actions) and self._take(rank, actions[self._position[rank]]):
                self._position[rank] += 1
                advanced = True
        waiting = [
            f"rank {rank} waits for what it needs to {actions[position]}"
            for rank, (actions, position) in enumerate(zip(self._lists, self._position, strict=True))
            if position < len(actions)
        ]
        assert advanced or not waiting, "deadlock: " + "; ".join(waiting)
        return bool(waiting)

    def _take(self, rank: int, action: Action) -> bool:
        """Takes one action; False where its inputs are not there yet."""
        match action.kind:
            case "send":
                return self._send(rank, action)
            case "receive":
                return self._receive(rank, action)
            case "reduce":
                # Collectives run beside computations, one after the other; the rank's update waits for them.
                start = max(self._free[rank], self._reduced[rank])
                self._reduced[rank] = start + self._times.of(action)
                self._record(rank, action, start, self._reduced[rank])
                return True
            case "update":
                self._compute(rank, action, self._reduced[rank])
                return True
        ready = [self._ready.get((rank, need)) for need in needs(action, self._num_chunks)]
        if None in ready:
            return False
        self._compute(rank, action, max((time for time in ready if time is not None), default=0.0))
        self._ready[rank, result(action)] = self._free[rank]
        return True

    def _compute(self, rank: int, action: Action, ready: float) -> None:
        start = max(self._free[rank], ready)
        self._free[rank] = start + self._times.of(action)
        self._record(rank, action, start, self._free[rank])

    def _send(self, rank: int, action: Action) -> bool:
        assert action.peer is not None
        transfers = self._transfers[rank, action.peer]
        start = max([self._free[rank], *(end for _, end in transfers[-1:])])
        transfers.append((start, start + self._times.of(action)))
        self._record(rank, action, *transfers[-1])
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        assert action.peer is not None and action.chunk is not None
        route = action.peer, rank
        if self._received[route] == len(self._transfers[route]):
            return False
        start, end = self._transfers[route][self._received[route]]
        self._received[route] += 1
        what, source = (
            ("activation", action.chunk - 1) if action.what == "activation" else ("gradient", action.chunk + 1)
        )
        self._ready[rank, (what, source, action.micro)] = end
        self._record(rank, action, start, end)
        return True

    def _record(self, rank: int, action: Action, start: float, end: float) -> None:
        self.events.append(TimelineEvent(rank, action.kind, action.chunk, action.micro, start, end))
