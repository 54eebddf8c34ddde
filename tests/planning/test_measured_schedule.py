"""Which schedule a run followed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from danlu.parallel.schedules import KINDS, Action, chunks_per_rank, schedule
from danlu.planning.action_times import ActionTimes
from danlu.planning.pipeline_simulation import ScheduleShape, measured_orders, measured_shape, simulate


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_known_again_with_data_ranks_too(kind: str) -> None:
    chunks = chunks_per_rank(kind)
    events = simulate(schedule(kind, 3, chunks, 6), ActionTimes(forward=1.5, send=0.125))
    shape = ScheduleShape(kind, 3, chunks, 6)
    assert measured_shape(measured_orders(events)) == shape
    twice = [replace(event, rank=event.rank + offset) for event in events for offset in (0, 3)]
    assert measured_shape(measured_orders(twice)) == shape


def test_an_order_of_nobody_s() -> None:
    orders = measured_orders(simulate(schedule("1f1b", 2, 1, 4)))
    orders[0][0], orders[0][1] = orders[0][1], orders[0][0]
    shape = measured_shape(orders)
    assert shape == ScheduleShape(None, 2, 1, 4)
    assert str(shape) == "no known schedule, 2 stages, 4 micro-batches"


def test_one_of_everything_in_words() -> None:
    assert str(ScheduleShape("naive", 1, 1, 1)) == "naive, 1 stage, 1 micro-batch"
    assert ScheduleShape("naive", 1, 1, 1).lists[0][0] == Action("forward", 0, 0)
