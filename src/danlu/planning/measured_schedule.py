"""The schedule of a measured timeline, from the order in which its ranks computed. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from danlu.parallel.schedules import KINDS, Action, schedule, schedule_problems
from danlu.parallel.timeline import TimelineEvent

_COMMUNICATION = ("send", "receive", "reduce")  # whose place in the order depends on who waits for whom


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
