"""The schedule of a pipeline's step: its simulated duration, its bubble by formula, and its recognition in a timeline.

Formulas: p ranks with v chunks each, m micro-batches, rank r. Bubbles hold for forward, input and weight gradient of
equal time (F = B = W) and messages that take none; of gpipe, 1f1b, interleaved and pipedream for any times. Imports no
torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from danlu.parallel.schedules import KINDS, Action, schedule, schedule_problems
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


def bubble_formula(kind: str, stages: int, chunks: int, micro_batches: int) -> tuple[str, float | None]:
    """The bubble of a schedule, idle time over busy time of all ranks, and its formula; None where there is none.

    naive p - 1; gpipe (arXiv:1811.06965), 1f1b and pipedream, between two flushes (arXiv:1806.03377) (p - 1)/m;
    interleaved (p - 1)/vm (arXiv:2104.04473, section 2.2.2); zb-h1 (p - 1)/3m (arXiv:2401.10241, table 1: (p - 1)(F + B
    - W) of m(F + B + W)); zbv (p - 1)/6m, all of it before a rank's first action or after its last, and dualpipev (p -
    1)/6m, both from m = 2p on. Terms for fewer micro-batches than ranks are derived here: then all wait for the first
    micro-batch's way there and back.
    """
    p, v, m = stages, chunks, micro_batches
    match kind:
        case "naive":
            return "p - 1", p - 1
        case "gpipe" | "1f1b" | "pipedream":
            return "(p - 1)/m", (p - 1) / m
        case "interleaved" if m >= p:
            return "(p - 1)/vm", (p - 1) / (v * m)
        case "interleaved":
            return "(p - 1 + (v - 1)(p - m))/vm", (p - 1 + (v - 1) * (p - m)) / (v * m)
        case "zb-h1" if m >= p:
            return "(p - 1)/3m", (p - 1) / (3 * m)
        case "zb-h1":
            return "(2p - 1 - m)/3m", (2 * p - 1 - m) / (3 * m)
        case _ if m >= 2 * p:
            return "(p - 1)/6m", (p - 1) / (6 * m)
    return "none for m < 2p", None


def in_flight_formula(kind: str, rank: int, stages: int, chunks: int, micro_batches: int) -> tuple[str, int]:
    """The most (chunk, micro-batch) pairs that a rank keeps activations of at once, and the formula.

    A chunk is 1/v of a rank's part of the model: 2p chunks of zbv are as much memory as p micro-batches of 1f1b.
    interleaved: 1 + (p - 1)/pv times the memory of 1f1b on the first rank (arXiv:2104.04473), counted on each rank.
    dualpipev: PP + 1 chunks (arXiv:2412.19437, table 2), where PP is our 2p. Minima with m are those of short steps.
    """
    p, v, m, r = stages, chunks, micro_batches, rank
    match kind:
        case "naive":
            return "1", 1
        case "gpipe":
            return "m", m
        case "1f1b" | "pipedream":
            return "min(m, p - r)", min(m, p - r)
        case "interleaved":
            rounds = max(1, m // p)
            return "min(vm, (v - 1)p + 2(p - 1 - r) + 1)", min(v * m, (v - 1) * (m // rounds) + 2 * (p - 1 - r) + 1)
        case "zb-h1":
            return "min(m, p)", min(m, p)
        case "zbv":
            return "min(2p, 2m, m + r + 1)", min(2 * p, 2 * m, m + r + 1)
    return "2p + 1", 2 * p + 1


_COMMUNICATION = ("send", "receive", "reduce")  # their place in the order depends on who waits for whom


@dataclass(frozen=True)
class ScheduleShape:
    """A recognized schedule: the arguments of `schedule`. `kind` is None for an order of none of these schedules."""

    kind: str | None
    stages: int
    chunks: int
    micro_batches: int

    @property
    def lists(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank. Raises RecipeError where there is no such schedule."""
        assert self.kind is not None, "an unknown order has no lists"
        return schedule(self.kind, self.stages, self.chunks, self.micro_batches)

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self.stages * self.chunks

    def __str__(self) -> str:
        stages = "1 stage" if self.stages == 1 else f"{self.stages} stages"
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        micro_batches = "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        return f"{self.kind or 'no known schedule'}, {stages}{chunks}, {micro_batches}"


def measured_orders(events: Iterable[TimelineEvent]) -> dict[int, list[Action]]:
    """The computations and updates of each rank, as they began. Events are by their start."""
    orders: dict[int, list[Action]] = defaultdict(list)
    for event in events:
        if event.kind not in _COMMUNICATION:
            orders[event.rank].append(Action(event.kind, event.chunk, event.micro))
    return dict(sorted(orders.items()))


def measured_shape(orders: dict[int, list[Action]]) -> ScheduleShape:
    """The first of our schedules that every rank of a run followed; ranks with the same chunks are data ranks."""
    actions = [action for order in orders.values() for action in order]
    chunks_of = [frozenset(a.chunk for a in order if a.chunk is not None) for order in orders.values()]
    stages, chunks = len(set(chunks_of)), max(map(len, chunks_of))
    micro_batches = 1 + max((action.micro for action in actions if action.micro is not None), default=0)
    shapes = [ScheduleShape(kind, stages, chunks, micro_batches) for kind in KINDS]
    unknown = ScheduleShape(None, stages, chunks, micro_batches)
    return next((shape for shape in shapes if _is_followed(shape, list(orders.values()))), unknown)


def _is_followed(shape: ScheduleShape, orders: Sequence[Sequence[Action]]) -> bool:
    """Whether the order of every rank is that of one of the schedule's ranks."""
    assert shape.kind is not None
    if next(schedule_problems(shape.kind, shape.stages, shape.chunks, shape.micro_batches), None) is not None:
        return False
    known = [[action for action in actions if action.kind not in _COMMUNICATION] for actions in shape.lists]
    return all(order in known for order in orders)
