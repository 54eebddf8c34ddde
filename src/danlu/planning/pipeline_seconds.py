"""When a step of a pipeline ends, as a simulation has it, without its events. Imports no torch.

A message stands in its rank's list directly behind the pass that makes it (`parallel.schedules.messages`), and a rank
never waits for what it has made itself. So of a pass only the end of the one before on its rank counts, and the arrival
of the one message that it takes. The order of the passes is kept for each schedule, and serves any seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from danlu.parallel.schedules import Action, placement
from danlu.parallel.schedules.schedule import compute_orders
from danlu.planning.step_walk import ChunkCost

_NONE = -1
_PASSES = ("forward", "input", "weight", "backward")


class PassOrder(NamedTuple):
    """The passes of all ranks in an order in which each comes after all that it waits for, as columns."""

    rank: array[int]
    work: array[int]
    """4 x chunk + the number of the pass's kind."""
    waits_for: array[int]
    """The number of the message that it takes; -1: none, or its rank has made that itself."""
    route: array[int]
    """The number of the pair of ranks that its result goes between; -1: it stays."""
    completes: array[int]
    """The chunk with gradients that are complete then, and summed over data ranks; -1: none."""
    routes: int
    """How many such pairs there are."""


def pipeline_seconds(
    kind: str,
    stages: int,
    chunks: int,
    micro_batches: int,
    costs: Sequence[ChunkCost],
    updates: Sequence[float],
) -> float:
    """Seconds from the beginning of a step to the end of the last update: those of the events of `step_walk`.

    costs: of each chunk of the model. updates: seconds of the optimizer on each rank. Raises RecipeError where there is
    no such schedule.
    """
    order = pass_order(kind, stages, chunks, micro_batches)
    seconds = [each for cost in costs for each in _pass_seconds(cost)]
    sends = [cost.send for cost in costs for _ in _PASSES]
    updates_each = kind == "pipedream"
    free, sums = [0.0] * stages, [0.0] * stages  # when each rank is free, and its last sum of gradients ends
    busy = [0.0] * order.routes  # when each route's last message has arrived
    arrivals: list[float] = []
    columns = order.rank, order.work, order.waits_for, order.route, order.completes
    for rank, work, waits_for, route, completed in zip(*columns, strict=True):
        end = free[rank]
        if waits_for >= 0 and arrivals[waits_for] > end:
            end = arrivals[waits_for]
        end += seconds[work]
        free[rank] = end
        if route >= 0:
            busy[route] = max(end, busy[route]) + sends[work]
            arrivals.append(busy[route])
        if completed >= 0:
            sums[rank] = max(end, sums[rank]) + costs[completed].reduce
            if updates_each:
                free[rank] = sums[rank] + updates[rank]
    if updates_each:
        return max(*free, *sums)
    return max(max(pair) + update for *pair, update in zip(free, sums, updates, strict=True))


def _pass_seconds(cost: ChunkCost) -> tuple[float, float, float, float]:
    whole = cost.input + cost.weight if cost.backward is None else cost.backward
    return cost.forward, cost.input, cost.weight, whole


@lru_cache(maxsize=256)
def pass_order(kind: str, stages: int, chunks: int, micro_batches: int) -> PassOrder:
    """The order of a schedule's passes: of each rank as many as possible, then of the next.

    Raises RecipeError where there is no such schedule.
    """
    local = placement(kind, stages, chunks)
    search = _Search(compute_orders(kind, stages, chunks, micro_batches), local, updates_each=kind == "pipedream")
    while search.advance():
        pass
    rank, work, waits_for, route, completes = search.columns
    return PassOrder(rank, work, waits_for, route, completes, len(search.routes))


class _Search:
    """Each rank's position in its list, and the messages that were sent."""

    def __init__(
        self, lists: Sequence[Sequence[Action]], local: Sequence[Sequence[int]], *, updates_each: bool
    ) -> None:
        self.columns = tuple(array("l") for _ in range(5))
        self.routes: dict[tuple[int, int], int] = {}
        self._lists, self._updates_each = lists, updates_each
        self._rank_of = {chunk: rank for rank, chunks in enumerate(local) for chunk in chunks}
        self._position = [0] * len(lists)
        self._messages: dict[tuple[str, int, int | None], int] = {}  # (pass that takes it, chunk, micro-batch)
        self._num_messages = 0
        self._last = [
            {each.chunk: place for place, each in enumerate(actions) if each.kind in ("backward", "weight")}
            for actions in lists
        ]

    def advance(self) -> bool:
        """Takes every rank as far as it can go; False once all have ended."""
        before = len(self.columns[0])
        is_waiting = False
        for rank, actions in enumerate(self._lists):
            position = self._position[rank]
            while position < len(actions) and self._take(rank, position, actions[position]):
                position += 1
            self._position[rank] = position
            is_waiting |= position < len(actions)
        assert len(self.columns[0]) > before or not is_waiting, "ranks wait for each other for ever"
        return is_waiting

    def _take(self, rank: int, position: int, action: Action) -> bool:
        """Takes one pass; False where its message was not sent yet."""
        chunk, micro, kind = action.chunk, action.micro, action.kind
        assert chunk is not None
        what, source, target = (
            ("forward", chunk - 1, chunk + 1) if kind == "forward" else ("back", chunk + 1, chunk - 1)
        )
        waits_for = route = completes = _NONE
        if kind != "weight":
            if self._rank_of.get(source, rank) != rank:
                number = self._messages.pop((what, chunk, micro), _NONE)
                if number == _NONE:
                    return False
                waits_for = number
            peer = self._rank_of.get(target, rank)
            if peer != rank:
                route = self.routes.setdefault((rank, peer), len(self.routes))
                self._messages[what, target, micro] = self._num_messages
                self._num_messages += 1
        if kind in ("backward", "weight") and (self._updates_each or self._last[rank][chunk] == position):
            completes = chunk
        values = rank, 4 * chunk + _PASSES.index(kind), waits_for, route, completes
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)
        return True
