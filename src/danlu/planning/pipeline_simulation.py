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
from danlu.parallel.timeline import TimelineEvent
from danlu.planning.action_times import ActionTimes
from danlu.planning.dependency_order import Step, dependency_order

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
    times = times or ActionTimes()
    return simulate_seconds(lists, [[times.of(action) for action in actions] for actions in lists])


def simulate_seconds(lists: Sequence[Sequence[Action]], seconds: Sequence[Sequence[float]]) -> list[TimelineEvent]:
    """The same with the seconds of each action of each list; those of a receive are its send's."""
    order = dependency_order(lists)
    starts, ends = action_times(order, seconds)
    events = []
    for step, start, end in zip(order, starts, ends, strict=False):
        action = lists[step.rank][step.position]
        events.append(TimelineEvent(step.rank, action.kind, action.chunk, action.micro, start, end))
    return events


def action_times(order: Sequence[Step], seconds: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """When each step of an order begins and ends, and a 0.0 behind the ends; seconds: of each action of each list."""
    starts, ends = list[float](), [0.0] * (len(order) + 1)  # the last one is that of no step
    free = [0.0] * len(seconds)  # when each rank has done all before
    for number, (rank, position, holds_rank, after, also_after, is_receive) in enumerate(order):
        end = ends[after]
        if is_receive:
            starts.append(starts[after])
            ends[number] = end
            continue
        start = free[rank]
        if end > start:
            start = end
        if ends[also_after] > start:
            start = ends[also_after]
        starts.append(start)
        end = ends[number] = start + seconds[rank][position]
        if holds_rank:
            free[rank] = end
    return starts, ends


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
