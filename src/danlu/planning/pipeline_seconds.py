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
    updates_each = kind == "pipedream"
    lists = _pass_lists(kind, stages, chunks, micro_batches)
    passes = _passes(placement(kind, stages, chunks), costs)
    places, ends, sums = [0] * stages, [0.0] * stages, [0.0] * stages  # `sums`: the last sum of gradients ends
    arrivals = [0.0] * (stages * stages)  # of the last message between two ranks
    waiting, done = [*range(stages)], -1
    while waiting:
        assert sum(places) > done, "ranks wait for each other for ever"
        done, behind = sum(places), []
        for rank in waiting:
            codes, place, now = lists[rank], places[rank], ends[rank]
            count = len(codes)
            while place < count:
                taken, seconds, route, given, send, reduce = passes[codes[place]]
                if taken is not None:
                    if not taken:
                        behind.append(rank)
                        break
                    if (arrival := taken.popleft()) > now:
                        now = arrival
                now += seconds
                if given is not None:
                    begin = arrivals[route]
                    arrivals[route] = arrival = (now if now > begin else begin) + send
                    given.append(arrival)
                if reduce is not None:
                    sums[rank] = max(now, sums[rank]) + reduce
                    if updates_each:
                        now = sums[rank] + updates[rank]
                place += 1
            places[rank], ends[rank] = place, now
        waiting = behind[::-1]  # gradients go the other way
    if updates_each:
        return max(*ends, *sums)
    return max(max(end, summed) + update for end, summed, update in zip(ends, sums, updates, strict=True))


@lru_cache(maxsize=64)
def _pass_lists(kind: str, stages: int, chunks: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """The computations of each rank by their numbers in `_passes`."""
    behind, lists = len(PASSES) * stages * chunks, []
    for codes in compute_codes(kind, stages, chunks, micro_batches):
        places = [place for place, code in enumerate(codes) if code % len(PASSES) in _GRADIENTS]
        last = places if kind == "pipedream" else {codes[place] // len(PASSES): place for place in places}.values()
        for place in last:
            codes[place] += behind
        lists.append(tuple(codes))
    return tuple(lists)


_Pass = tuple[deque[float] | None, float, int, deque[float] | None, float, float | None]
"""(arrivals of the messages that it takes; its seconds; the pair of ranks that it sends its result between, and the
arrivals of these messages; seconds of one of them; seconds of the sum of gradients behind it). None: there is none."""


def _passes(local: Sequence[Sequence[int]], costs: Sequence[ChunkCost]) -> list[_Pass]:
    """The passes of all chunks by their numbers (`ComputeOrder.codes`), then once more with a sum of gradients behind
    each of them.
    """
    rank_of = {chunk: rank for rank, chunks in enumerate(local) for chunk in chunks}
    routes = [0] * len(costs) * len(PASSES)
    taken: list[deque[float] | None] = [None] * len(routes)
    given: list[deque[float] | None] = [None] * len(routes)
    for chunk, rank in rank_of.items():
        for kinds, other in (((0,), chunk + 1), ((1, 3), chunk - 1)):  # forward; input, backward
            if rank_of.get(other, rank) == rank:
                continue
            messages: deque[float] = deque()
            for number in kinds:
                code, taker = len(PASSES) * chunk + number, len(PASSES) * other + number
                routes[code] = rank * len(local) + rank_of[other]
                given[code] = taken[taker] = messages
    seconds = [each for cost in costs for each in _pass_seconds(cost)]
    of_chunk = [cost for cost in costs for _ in PASSES]
    alone = zip(taken, seconds, routes, given, of_chunk, strict=True)
    parts = [(takes, each, route, gives, cost.send) for takes, each, route, gives, cost in alone]
    reduced = [(*each, cost.reduce) for each, cost in zip(parts, of_chunk, strict=True)]
    return [*((*each, None) for each in parts), *reduced]


def _pass_seconds(cost: ChunkCost) -> tuple[float, float, float, float]:
    whole = cost.input + cost.weight if cost.backward is None else cost.backward
    return cost.forward, cost.input, cost.weight, whole
