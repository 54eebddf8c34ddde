"""A pipeline's step simulated action by action with all state in dictionaries: slow, and easy to see through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from danlu.parallel.schedules import Action
from danlu.parallel.schedules.dependencies import Result, needs, result
from danlu.parallel.timeline import TimelineEvent
from danlu.planning.action_times import ActionTimes


def simulate_plainly(lists: Sequence[Sequence[Action]], times: ActionTimes) -> list[TimelineEvent]:
    """The events of `pipeline_simulation.simulate`, in their order."""
    simulation = _Simulation(lists, times)
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
                # Collectives run next to computations, one after the other; the rank's update waits for them.
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
