"""A lower bound on the seconds of a pipeline's step, without a simulation. Imports no torch.

The bound is the longest of some paths through a step: chains of passes and messages of which each waits for the one
before it. A simulated step lasts as long as the longest of all its paths, so no bound is above it. These paths enter a
rank with the first micro-batch, stay for all of its work, and leave with the last micro-batch; or they follow all
messages over one boundary, or round trips of micro-batches of which each waits for an earlier one. The places of such
passes in a rank's list are counted once for each schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from danlu.parallel.schedules import Action, placement
from danlu.parallel.schedules.compute_order import micro_batches_per_round
from danlu.parallel.schedules.schedule import compute_orders
from danlu.planning.step_walk import ChunkCost

_ROUNDING = 1e-10
"""The share by which two sums of the same seconds may differ that are added in another order."""
_STEADY = 4
"""Micro-batches for each stage from which on more of them change neither the beginning nor the end of a list."""

Work = tuple[tuple[int, int, int, int, int], ...]
"""Work on a rank: (chunk, forward, input, weight and whole backward passes) of each of its chunks."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The places of one chunk's first and last passes in its rank's list."""

    rank: int
    before_forward: Work
    """The rank's work before the first micro-batch's forward pass of the chunk."""
    before_backward: Work
    after_forward: Work
    """The rank's work after the last micro-batch's forward pass of the chunk."""
    after_backward: Work
    ahead: int
    """Forward pass k + `ahead` comes after backward pass k; as many as there are micro-batches where none does."""
    put_off: int | None
    """Micro-batches with a backward pass that leaves weight gradients for later; None: all of them."""
    first_is_split: bool
    """Whether the first micro-batch is one of them."""
    last_is_split: bool
    last_of_rank: int
    """The chunk that the rank's last gradients are of."""


def lower_bound(
    kind: str, stages: int, chunks: int, micro_batches: int, costs: Sequence[ChunkCost], update: float = 0.0
) -> float:
    """Seconds that a simulated step takes at the least.

    costs: of each chunk of the model. update: seconds of the optimizer on each rank.
    """
    places = chunk_places(kind, stages, chunks, representative(kind, stages, micro_batches))
    paths = _Paths(places, costs, stages, micro_batches, update, updates_each=kind == "pipedream")
    return paths.longest() * (1 - _ROUNDING)


def representative(kind: str, stages: int, micro_batches: int) -> int:
    """The fewest micro-batches of steps with the same beginning and end of every rank's list, and the same peak of
    memory (`step_walk`).
    """
    if kind == "gpipe" or (kind == "interleaved" and micro_batches_per_round(stages, micro_batches) != stages):
        return micro_batches  # all forward passes are the beginning; rounds are longer with other numbers
    return min(micro_batches, _STEADY * stages)


class _Paths:
    """The seconds of a schedule's paths; lists are by chunk, and passes of the first and the last micro-batch apart."""

    def __init__(
        self,
        places: Sequence[ChunkPlace],
        costs: Sequence[ChunkCost],
        stages: int,
        micro_batches: int,
        update: float,
        *,
        updates_each: bool,
    ) -> None:
        self._places, self._micro_batches, self._count = places, micro_batches, len(places)
        whole = [cost.input + cost.weight if cost.backward is None else cost.backward for cost in costs]
        both = list(zip(places, costs, whole, strict=True))
        self._forward = [cost.forward for cost in costs]
        self._first = [cost.input if place.first_is_split else back for place, cost, back in both]
        self._last = [cost.input if place.last_is_split else back for place, cost, back in both]
        ends = [cost.reduce + update for cost in costs]
        # PipeDream sums and updates behind each backward pass.
        self._behind = ends if updates_each else [0.0] * self._count
        self._end = [0.0 if updates_each else ends[place.last_of_rank] for place in places]
        self._seconds = [
            (cost.forward, cost.input, cost.weight, back + behind)
            for (_, cost, back), behind in zip(both, self._behind, strict=True)
        ]
        rank_of = [place.rank for place in places]
        self._down, self._up = [0.0] * self._count, [0.0] * self._count  # messages from each chunk to its neighbours
        for chunk in range(1, self._count):
            if rank_of[chunk] != rank_of[chunk - 1]:
                self._down[chunk - 1], self._up[chunk] = costs[chunk - 1].send, costs[chunk].send
        self._total = [0.0] * stages
        for chunk, place in enumerate(places):
            split = micro_batches if place.put_off is None else place.put_off
            forward, input_, weight, back = self._seconds[chunk]
            work = micro_batches * forward + split * (input_ + weight) + (micro_batches - split) * back
            self._total[place.rank] += work

    def _work(self, work: Work) -> float:
        total = 0.0
        for chunk, forward, input_, weight, backward in work:
            seconds = self._seconds[chunk]
            total += forward * seconds[0] + input_ * seconds[1] + weight * seconds[2] + backward * seconds[3]
        return total

    def longest(self) -> float:
        """The seconds of the longest of the paths."""
        places, last = self._places, self._count - 1
        forwards, back = self._forward, [min(pair) for pair in zip(self._first, self._last, strict=True)]
        to_end, from_end = self._tails()
        # By rank: the latest beginning that the work of its list may be thought to have, so far.
        begins = [0.0] * len(self._total)
        start, longest = 0.0, 0.0
        starts = []
        for chunk, place in enumerate(places):
            before = self._work(place.before_forward)
            start = max(start, begins[place.rank] + before)
            begins[place.rank] = max(begins[place.rank], start - before)
            starts.append(start)
            through = self._total[place.rank] - self._work(place.after_forward)
            longest = max(longest, begins[place.rank] + through + to_end[chunk])
            start += forwards[chunk]
            if chunk < last:
                messages = self._micro_batches * self._down[chunk]
                longest = max(longest, start + messages + forwards[chunk + 1] + to_end[chunk + 1])
                start += self._down[chunk]
        trip = 0.0
        for chunk in range(last, -1, -1):
            place = places[chunk]
            before = self._work(place.before_backward)
            start = max(start, begins[place.rank] + before)
            begins[place.rank] = max(begins[place.rank], start - before)
            through = self._total[place.rank] - self._work(place.after_backward) - self._behind[chunk]
            longest = max(longest, begins[place.rank] + through + from_end[chunk])
            trip += forwards[chunk] + back[chunk] + (self._down[chunk] + self._up[chunk + 1] if chunk < last else 0.0)
            trips = (self._micro_batches - 1) // place.ahead + 1
            left = self._micro_batches - 1 - (trips - 1) * place.ahead
            path = starts[chunk] + trips * trip + left * (self._behind[chunk] + back[chunk])
            longest = max(longest, path + from_end[chunk])
            start += self._first[chunk]
            if chunk:
                messages = self._micro_batches * self._up[chunk]
                longest = max(longest, start + messages + self._last[chunk - 1] + from_end[chunk - 1])
                start += self._up[chunk]
        ends = {place.rank: end for place, end in zip(places, self._end, strict=True)}
        return max(longest, *(begins[rank] + self._total[rank] + end for rank, end in ends.items()))

    def _tails(self) -> tuple[list[float], list[float]]:
        """Seconds to the end of the step from the end of the last forward and the last backward pass of each chunk."""
        last = self._count - 1
        from_end = [0.0] * self._count
        for chunk, place in enumerate(self._places):
            rest = self._behind[chunk] + self._work(place.after_backward) + self._end[chunk]
            chain = self._up[chunk] + self._last[chunk - 1] + from_end[chunk - 1] if chunk else 0.0
            from_end[chunk] = max(rest, chain)
        to_end = [0.0] * self._count
        to_end[last] = self._last[last] + from_end[last]
        for chunk in range(last, -1, -1):
            place = self._places[chunk]
            if chunk < last:
                to_end[chunk] = self._down[chunk] + self._forward[chunk + 1] + to_end[chunk + 1]
            to_end[chunk] = max(to_end[chunk], self._work(place.after_forward) + self._end[chunk])
        return to_end, from_end


@lru_cache(maxsize=512)
def chunk_places(kind: str, stages: int, chunks: int, micro_batches: int) -> tuple[ChunkPlace, ...]:
    """The places of each chunk of the model. Raises RecipeError where there is no such schedule."""
    orders = compute_orders(kind, stages, chunks, micro_batches)
    places: dict[int, ChunkPlace] = {}
    for rank, (local, order) in enumerate(zip(placement(kind, stages, chunks), orders, strict=True)):
        last_gradients = [action.chunk for action in order if action.kind in ("backward", "weight")][-1]
        assert last_gradients is not None
        for chunk in local:
            places[chunk] = _place(rank, local, order, chunk, micro_batches, last_gradients)
    return tuple(place for _, place in sorted(places.items()))


def _place(
    rank: int, local: Sequence[int], order: Sequence[Action], chunk: int, micro_batches: int, last_of_rank: int
) -> ChunkPlace:
    forwards, backwards, split = [0] * micro_batches, [0] * micro_batches, [False] * micro_batches
    for position, action in enumerate(order):
        if action.chunk == chunk and action.micro is not None:
            if action.kind == "forward":
                forwards[action.micro] = position
            elif action.kind != "weight":
                backwards[action.micro] = position
                split[action.micro] = action.kind == "input"
    ahead = next(
        count
        for count in range(1, micro_batches + 1)
        if all(forwards[micro + count] > backwards[micro] for micro in range(micro_batches - count))
    )
    return ChunkPlace(
        rank,
        before_forward=_work(local, order[: forwards[0]]),
        before_backward=_work(local, order[: backwards[0]]),
        after_forward=_work(local, order[forwards[-1] + 1 :]),
        after_backward=_work(local, order[backwards[-1] + 1 :]),
        ahead=ahead,
        put_off=None if all(split) else sum(split),
        first_is_split=split[0],
        last_is_split=split[-1],
        last_of_rank=last_of_rank,
    )


def _work(local: Sequence[int], actions: Sequence[Action]) -> Work:
    counts = {chunk: [0, 0, 0, 0] for chunk in local}
    for action in actions:
        assert action.chunk is not None
        counts[action.chunk][("forward", "input", "weight", "backward").index(action.kind)] += 1
    return tuple((chunk, forward, input_, weight, back) for chunk, (forward, input_, weight, back) in counts.items())
