"""The seconds of a pipeline's step without its events are those of the simulated events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from danlu.core.errors import RecipeError
from danlu.parallel.schedules import KINDS, chunks_per_rank, schedule, schedule_problems
from danlu.planning.pipeline_seconds import pipeline_seconds
from danlu.planning.step_walk import ChunkCost, RankCost, walk

Shape = tuple[str, int, int, int]
SHAPES: list[Shape] = [
    (kind, stages, chunks, micro_batches)
    for kind, chunks in [*((kind, chunks_per_rank(kind)) for kind in KINDS), ("interleaved", 3)]
    for stages in (1, 2, 3, 4)
    for micro_batches in (1, 2, 5, 8, 12)
    if not [*schedule_problems(kind, stages, chunks, micro_batches)]
]


def random_costs(random: Random, count: int) -> list[ChunkCost]:
    """Some with slow messages and sums, some with whole backward passes of a time of their own."""
    slow, is_apart = random.choice((0.0, 0.3, 5.0)), random.random() < 0.5

    def cost() -> ChunkCost:
        forward, input_, weight, back, send, reduce = (random.random() for _ in range(6))
        backward = 2 * back if is_apart else None
        return ChunkCost(
            forward=forward, input=input_, weight=weight, backward=backward, send=slow * send, reduce=slow * reduce
        )

    return [cost() for _ in range(count)]


def simulated(shape: Shape, costs: Sequence[ChunkCost], updates: Sequence[float]) -> float:
    walks = walk(schedule(*shape), costs, [RankCost(update=update) for update in updates])
    return max(event.end_s for each in walks for event in each.events)


WRONG: dict[str, Callable[[Shape, list[ChunkCost], list[float]], float]] = {
    "messages take no time": lambda shape, costs, updates: pipeline_seconds(
        *shape, [replace(cost, send=0.0) for cost in costs], updates
    ),
    "sums take no time": lambda shape, costs, updates: pipeline_seconds(
        *shape, [replace(cost, reduce=0.0) for cost in costs], updates
    ),
    "another rank updates": lambda shape, costs, updates: pipeline_seconds(*shape, costs, updates[::-1]),
}


def test_the_seconds_are_those_of_the_events() -> None:
    random, shown = Random(3), set[str]()
    for shape in SHAPES:
        costs, updates = random_costs(random, shape[1] * shape[2]), [3 * random.random() for _ in range(shape[1])]
        expected = simulated(shape, costs, updates)
        assert pipeline_seconds(*shape, costs, updates) == pytest.approx(expected, rel=1e-12), shape
        # Control: each mistake shows on some of the shapes.
        shown |= {name for name, of in WRONG.items() if of(shape, costs, updates) != pytest.approx(expected, rel=1e-6)}
    assert shown == WRONG.keys()


def test_there_is_no_such_schedule() -> None:
    with pytest.raises(RecipeError, match="needs 4 or more"):
        pipeline_seconds("dualpipev", 2, 2, 3, [ChunkCost()] * 4, [0.0] * 2)
