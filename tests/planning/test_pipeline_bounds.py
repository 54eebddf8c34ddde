"""Bounds on the seconds of pipelined steps: never above a simulation, equal to it where chunks are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.parallel.schedules import KINDS, chunks_per_rank, schedule, schedule_problems
from danlu.planning.pipeline_bounds import chunk_places, lower_bound, representative
from danlu.planning.step_walk import ChunkCost, RankCost, WalkBytes, rank_bytes, walk

VARIANTS = [(kind, chunks_per_rank(kind)) for kind in KINDS] + [("interleaved", 3)]
Shape = tuple[str, int, int, int]
ALIKE = ChunkCost(forward=1, input=1, weight=1)


def shapes(stages: Sequence[int], micro_batches: Sequence[int]) -> list[Shape]:
    return [
        (kind, p, chunks, m)
        for kind, chunks in VARIANTS
        for p in stages
        for m in micro_batches
        if not [*schedule_problems(kind, p, chunks, m)]
    ]


SHAPES = shapes((1, 2, 4), (1, 2, 5, 8, 11))


def simulated(shape: Shape, costs: Sequence[ChunkCost], update: float) -> float:
    walks = walk(schedule(*shape), costs, [RankCost(update=update)] * shape[1])
    return max(event.end_s for each in walks for event in each.events)


def random_costs(random: Random, count: int) -> list[ChunkCost]:
    """Some without messages, some with slow ones; some with whole backward passes of a time of their own."""
    slow, apart = random.choice((0.0, 0.1, 5.0)), random.random() < 0.5

    def cost() -> ChunkCost:
        forward, input_, weight, back, send, reduce = (random.random() for _ in range(6))
        return ChunkCost(
            forward=forward,
            input=input_,
            weight=weight,
            backward=2 * back if apart else None,
            send=slow * send,
            reduce=slow * reduce,
        )

    return [cost() for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 10**6))
def test_no_bound_is_above_a_simulation(shape: Shape, seed: int) -> None:
    random = Random(seed)
    costs, update = random_costs(random, shape[1] * shape[2]), random.random()
    bound = lower_bound(*shape, costs, update)
    assert 0 < bound <= simulated(shape, costs, update)


TOO_HIGH: dict[str, Callable[[Shape, Sequence[ChunkCost]], float]] = {
    "a micro-batch more": lambda shape, costs: lower_bound(shape[0], shape[1], shape[2], shape[3] + 1, costs),
    "a thousandth more": lambda shape, costs: 1.001 * lower_bound(*shape, costs),
    "messages that hold a rank": lambda shape, costs: lower_bound(
        *shape, [replace(cost, forward=cost.forward + cost.send) for cost in costs]
    ),
    "gradients of weights before messages": lambda shape, costs: lower_bound(
        *shape, [replace(cost, input=cost.input + cost.weight, weight=0.0) for cost in costs]
    ),
}


def test_a_bound_that_is_too_high_is_caught() -> None:
    """Control: each mistake shows on some of the shapes of the test above."""
    cost, shown = replace(ALIKE, send=0.25), set[str]()
    for shape in SHAPES[::3]:
        kind, stages, chunks, micro_batches = shape
        if not [*schedule_problems(kind, stages, chunks, micro_batches + 1)]:
            costs = [cost] * stages * chunks
            seconds = simulated(shape, costs, 0.0)
            shown |= {mistake for mistake, bound in TOO_HIGH.items() if bound(shape, costs) > seconds}
    assert shown == TOO_HIGH.keys()


def test_bounds_of_like_chunks_are_what_a_simulation_takes() -> None:
    """With the first and the last chunk longer, as by an embedding and a head; so a search need not simulate many."""
    for shape in SHAPES[::2]:
        kind, stages, chunks, micro_batches = shape
        if kind == "zbv" and micro_batches < 2 * stages:
            continue  # ranks wait in the midst of their lists
        costs = [replace(ALIKE, send=0.05, reduce=0.5)] * stages * chunks
        costs[0], costs[-1] = replace(costs[0], forward=1.05), replace(costs[-1], forward=1.25, input=1.25, weight=1.25)
        assert lower_bound(*shape, costs, 0.5) == pytest.approx(simulated(shape, costs, 0.5), rel=1e-9), shape


def fullest(shape: Shape, costs: Sequence[ChunkCost], ranks: Sequence[RankCost]) -> list[WalkBytes]:
    """The parts of each rank's peak."""
    lists, by_micro = schedule(*shape), [costs] * shape[3]
    moments = [rank_bytes(actions, by_micro, rank) for actions, rank in zip(lists, ranks, strict=True)]
    return [max(each, key=sum) for each in moments]


def test_fewer_micro_batches_stand_for_many() -> None:
    """They have the same places of passes and the same peak of memory; control: one stage's fewer have not."""
    random, differing = Random(0), 0
    for shape in shapes((2, 3, 5), (7, 9, 12, 17)):
        kind, stages, chunks, micro_batches = shape
        short = kind, stages, chunks, representative(kind, stages, micro_batches)
        assert chunk_places(*shape) == chunk_places(*short), shape
        costs = []
        for _ in range(stages * chunks):
            kept, waiting, *sizes = (random.randrange(1, 100) for _ in range(9))
            forward, backward, gradients, message, loss, of_forward, first = sizes
            costs.append(
                ChunkCost(
                    kept=kept + message,
                    forward_peak=kept + message + forward,
                    backward_peak=kept + message + backward,
                    input_peak=kept + message + waiting,
                    kept_for_weight=waiting,
                    weight_peak=waiting + first,
                    gradients=gradients + of_forward,
                    gradients_of_forward=of_forward,
                    message=message,
                    loss=loss,
                    reduce_buffer=random.randrange(30),
                    gathered=random.randrange(30),
                )
            )
        keeps = random.random() < 0.5
        ranks = [RankCost(trained=50, weight_delay=stages - 1 - rank, keeps_gathered=keeps) for rank in range(stages)]
        peaks = fullest(shape, costs, ranks)
        assert peaks == fullest(short, costs, ranks), shape
        if not [*schedule_problems(kind, stages, chunks, stages - 1)]:
            differing += peaks != fullest((kind, stages, chunks, stages - 1), costs, ranks)
    assert differing
