"""When a step of a pipeline ends, as a simulation has it, without its events. Imports no torch.

A message stands in its rank's list directly behind the pass that makes it (`parallel.schedules.messages`), and a rank
never waits for what it has made itself. So of a pass only the end of the one before on its rank counts, and the arrival
of the one message that it takes. Micro-batches go through a chunk in their order, so that it is the chunk's next one,
and passes are told apart by no more than their chunk and their kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from danlu.parallel.schedules import placement
from danlu.parallel.schedules.compute_order import PASSES
from danlu.parallel.schedules.schedule import compute_codes
from danlu.planning.step_walk import ChunkCost

_GRADIENTS = tuple(PASSES.index(kind) for kind in ("weight", "backward"))


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
    lists = _pass_lists(kind, stages, chunks, micro_batches)
    ends = _Ends(placement(kind, stages, chunks), costs, updates, updates_each=kind == "pipedream")
    waiting = [_Waiting(rank, codes, 0) for rank, codes in enumerate(lists)]
    while waiting:
        behind = [each for each in map(ends.advance, waiting) if each is not None]
        assert sum(each.position for each in behind) > sum(each.position for each in waiting) or len(behind) < len(
            waiting
        ), "ranks wait for each other for ever"
        waiting = behind[::-1]  # gradients go the other way
    return ends.step()


@lru_cache(maxsize=64)
def _pass_lists(kind: str, stages: int, chunks: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """The computations of each rank; those behind which a chunk's gradients are summed have -1 - their number."""
    lists = []
    for codes in compute_codes(kind, stages, chunks, micro_batches):
        places = [place for place, code in enumerate(codes) if code % len(PASSES) in _GRADIENTS]
        last = places if kind == "pipedream" else {codes[place] // len(PASSES): place for place in places}.values()
        for place in last:
            codes[place] = -1 - codes[place]
        lists.append(tuple(codes))
    return tuple(lists)


class _Waiting(NamedTuple):
    """A rank that has not ended its list."""

    rank: int
    codes: Sequence[int]
    position: int


class _Ends:
    """When each rank has ended what it has done so far, and the arrivals of messages that no pass has taken yet."""

    def __init__(
        self,
        local: Sequence[Sequence[int]],
        costs: Sequence[ChunkCost],
        updates: Sequence[float],
        *,
        updates_each: bool,
    ) -> None:
        self._costs, self._updates, self._updates_each = costs, updates, updates_each
        self._seconds = [each for cost in costs for each in _pass_seconds(cost)]
        self._sends = [cost.send for cost in costs for _ in PASSES]
        self._free, self._sums = [0.0] * len(local), [0.0] * len(local)  # `_sums`: the last sum of gradients ends
        rank_of = {chunk: rank for rank, chunks in enumerate(local) for chunk in chunks}
        self._routes: list[int | None] = [None] * len(self._seconds)
        """The number of the pair of ranks that each pass sends its result between; None: it stays."""
        self._takes: list[deque[float] | None] = [None] * len(self._seconds)
        """The messages for each pass; None: it takes none."""
        self._gives: list[deque[float] | None] = [None] * len(self._seconds)
        routes: dict[tuple[int, int], int] = {}
        for chunk, rank in rank_of.items():
            for kinds, other in (((0,), chunk + 1), ((1, 3), chunk - 1)):  # forward; input, backward
                if rank_of.get(other, rank) == rank:
                    continue
                messages: deque[float] = deque()
                for number in kinds:
                    code, taker = len(PASSES) * chunk + number, len(PASSES) * other + number
                    self._routes[code] = routes.setdefault((rank, rank_of[other]), len(routes))
                    self._gives[code] = self._takes[taker] = messages
        self._busy = [0.0] * len(routes)
        """When each route's last message has arrived."""

    def advance(self, waiting: _Waiting) -> _Waiting | None:
        """Takes a rank as far as it can go; None where that is the end of its list."""
        rank, codes, position = waiting
        takes, gives, seconds, sends = self._takes, self._gives, self._seconds, self._sends
        routes, busy, now = self._routes, self._busy, self._free[rank]
        while position < len(codes):
            code = codes[position]
            sums = code < 0
            if sums:
                code = -1 - code
            if (messages := takes[code]) is not None:
                if not messages:
                    self._free[rank] = now
                    return _Waiting(rank, codes, position)
                arrival = messages.popleft()
                if arrival > now:
                    now = arrival
            now += seconds[code]
            if (route := routes[code]) is not None:
                begin = busy[route]
                busy[route] = arrival = (now if now > begin else begin) + sends[code]
                gives[code].append(arrival)  # type: ignore[union-attr]
            if sums:
                now = self._sum(rank, code // len(PASSES), now)
            position += 1
        self._free[rank] = now
        return None

    def _sum(self, rank: int, chunk: int, now: float) -> float:
        """Sums a chunk's gradients over data ranks; returns when the rank goes on."""
        self._sums[rank] = max(now, self._sums[rank]) + self._costs[chunk].reduce
        return self._sums[rank] + self._updates[rank] if self._updates_each else now

    def step(self) -> float:
        """Returns when the last update has ended."""
        if self._updates_each:
            return max(*self._free, *self._sums)
        ends = zip(self._free, self._sums, self._updates, strict=True)
        return max(max(free, sums) + update for free, sums, update in ends)


def _pass_seconds(cost: ChunkCost) -> tuple[float, float, float, float]:
    whole = cost.input + cost.weight if cost.backward is None else cost.backward
    return cost.forward, cost.input, cost.weight, whole
