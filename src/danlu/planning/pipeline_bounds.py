"""A lower bound on the seconds of a pipeline's step, without a simulation. Imports no torch.

The bound is the longest of some paths through a step: chains of passes and messages of which each waits for the one
before it. A simulated step lasts as long as the longest of all its paths, so no bound is above it. These paths enter a
rank with the first micro-batch, stay for all of its work, and leave with the last micro-batch; or they follow all
messages over one boundary, or round trips of micro-batches of which each waits for an earlier one. The places of such
passes in a rank's list are counted once for each schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from danlu.parallel.schedules import placement
from danlu.parallel.schedules.compute_order import PASSES, micro_batches_per_round
from danlu.parallel.schedules.messages import UNFINISHED_SENDS
from danlu.parallel.schedules.schedule import compute_codes
from danlu.planning.step_walk import ChunkCost

_ROUNDING = 1e-10
"""The share by which two sums of the same seconds may differ that are added in another order."""

_FORWARD, _INPUT, _WEIGHT, _BACKWARD = map(PASSES.index, ("forward", "input", "weight", "backward"))

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
    """Micro-batches of the shortest step with the same beginning and end of every rank's list, and the same peak of
    memory (`step_walk`).

    A pipeline is full after its first rounds, and once as many messages are on their way as there can be.
    """
    if kind == "gpipe" or (kind == "interleaved" and micro_batches_per_round(stages, micro_batches) != stages):
        return micro_batches  # all forward passes are the beginning; rounds are longer with other numbers
    match kind:
        case "1f1b" | "zb-h1":
            fewest = stages + UNFINISHED_SENDS
        case "zbv":
            fewest = 2 * stages + UNFINISHED_SENDS
        case "interleaved":
            fewest = 3 * stages
        case _:
            fewest = 4 * stages
    return min(micro_batches, fewest)


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
    orders = compute_codes(kind, stages, chunks, micro_batches)
    places: dict[int, ChunkPlace] = {}
    for rank, (local, order) in enumerate(zip(placement(kind, stages, chunks), orders, strict=True)):
        places |= _places_of_rank(rank, local, order, micro_batches)
    return tuple(place for _, place in sorted(places.items()))


def _places_of_rank(rank: int, local: Sequence[int], order: Sequence[int], micro_batches: int) -> dict[int, ChunkPlace]:
    """The places of a rank's chunks, by chunk. order: numbers of passes (`ComputeOrder.codes`)."""
    forwards: dict[int, list[int]] = {chunk: [] for chunk in local}  # positions, by micro-batch
    backwards: dict[int, list[int]] = {chunk: [] for chunk in local}
    is_split: dict[int, list[bool]] = {chunk: [] for chunk in local}
    done = {chunk: [0, 0, 0, 0] for chunk in local}
    until: dict[tuple[int, bool, bool], Work] = {}  # work before the first, and up to the last pass of a chunk
    last_gradients = local[0]
    for position, code in enumerate(order):
        chunk, kind = divmod(code, len(PASSES))
        passes = forwards[chunk] if kind == _FORWARD else backwards[chunk]
        if kind != _WEIGHT and not passes:
            until[chunk, kind == _FORWARD, True] = _work(done)
        done[chunk][kind] += 1
        if kind != _WEIGHT:
            passes.append(position)
            if len(passes) == micro_batches:
                until[chunk, kind == _FORWARD, False] = _work(done)
            if kind != _FORWARD:
                is_split[chunk].append(kind == _INPUT)
        if kind in (_WEIGHT, _BACKWARD):
            last_gradients = chunk
    total = _work(done)
    return {
        chunk: ChunkPlace(
            rank,
            before_forward=until[chunk, True, True],
            before_backward=until[chunk, False, True],
            after_forward=_rest(total, until[chunk, True, False]),
            after_backward=_rest(total, until[chunk, False, False]),
            ahead=_ahead(forwards[chunk], backwards[chunk]),
            put_off=None if all(is_split[chunk]) else sum(is_split[chunk]),
            first_is_split=is_split[chunk][0],
            last_is_split=is_split[chunk][-1],
            last_of_rank=last_gradients,
        )
        for chunk in local
    }


def _ahead(forwards: Sequence[int], backwards: Sequence[int]) -> int:
    """The least count such that forward pass k + count comes after backward pass k."""
    micro_batches, count = len(forwards), 1
    for micro, backward in enumerate(backwards):
        while micro + count < micro_batches and forwards[micro + count] < backward:
            count += 1
    return count


def _work(done: Mapping[int, Sequence[int]]) -> Work:
    return tuple((chunk, *counts) for chunk, counts in done.items())  # type: ignore[misc]


def _rest(total: Work, done: Work) -> Work:
    return tuple(
        (whole[0], *(all_ - own for all_, own in zip(whole[1:], part[1:], strict=True)))  # type: ignore[misc]
        for whole, part in zip(total, done, strict=True)
    )
