"""Lists of actions with times: steps worked out by hand, messages, sums of gradients and updates."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from builders.plain_simulation import simulate_plainly

from danlu.parallel.schedules import KINDS, Action, chunks_per_rank, schedule, schedule_problems
from danlu.parallel.timeline import TimelineEvent
from danlu.planning.action_times import ActionTimes
from danlu.planning.pipeline_simulation import bubble, simulate

CHUNK_TIMES = ("forward", "input", "weight", "backward", "send", "reduce")


def spans(events: list[TimelineEvent], kind: str, rank: int) -> list[tuple[float, float]]:
    return [(event.start_s, event.end_s) for event in events if (event.kind, event.rank) == (kind, rank)]


def test_a_step_worked_out_by_hand() -> None:
    """gpipe on two ranks: the second has forward passes of 3 s, messages take 1 s."""
    times = ActionTimes(forward=(2.0, 3.0), backward=4.0, send=1.0, reduce=2.0, update=0.5)
    events = simulate(schedule("gpipe", 2, 1, 2), times)
    assert spans(events, "forward", 0) == [(0, 2), (2, 4)]
    assert spans(events, "send", 0) == spans(events, "receive", 1) == [(2, 3), (4, 5)]
    assert spans(events, "forward", 1) == [(3, 6), (6, 9)]
    assert spans(events, "backward", 1) == [(9, 13), (13, 17)]
    assert spans(events, "send", 1) == [(13, 14), (17, 18)]
    assert spans(events, "backward", 0) == [(14, 18), (18, 22)]
    # Sums of gradients begin behind the last backward pass; the update waits for them.
    assert spans(events, "reduce", 1) == [(17, 19)] and spans(events, "update", 1) == [(19, 19.5)]
    assert spans(events, "reduce", 0) == [(22, 24)] and spans(events, "update", 0) == [(24, 24.5)]
    # From the first to the last computation, without the update: two ranks of 22 s, of which 12 and 14 are busy.
    measured = bubble(events)
    assert (measured.busy_s, measured.idle_s) == (26, 18)
    assert measured.inner_idle_s == (10, 0)
    assert measured.ratio == pytest.approx(18 / 26)


def test_messages_of_one_direction_go_one_after_the_other() -> None:
    events = simulate(schedule("gpipe", 2, 1, 3), ActionTimes(forward=1.0, send=5.0))
    assert spans(events, "receive", 1) == [(1, 6), (6, 11), (11, 16)]
    # Those of the other direction need not wait for them.
    assert spans(events, "send", 1)[0][0] == spans(events, "backward", 1)[0][1]


def test_the_sum_of_a_chunk_s_gradients_hides_behind_other_chunks() -> None:
    lists = schedule("interleaved", 2, 2, 2)
    quick, slow = (simulate(lists, ActionTimes(reduce=seconds)) for seconds in (0.0, 1.0))
    assert bubble(slow).idle_s == bubble(quick).idle_s
    late = max(event.end_s for event in slow) - max(event.end_s for event in quick)
    assert late == 1.0  # the first chunk's, of two


def test_pipedream_s_updates_are_part_of_its_work() -> None:
    lists = schedule("pipedream", 2, 1, 4)
    assert bubble(simulate(lists, ActionTimes(update=0.5))).busy_s == 2 * 4 * (3 + 0.5)
    assert bubble(simulate(schedule("1f1b", 2, 1, 4), ActionTimes(update=0.5))).busy_s == 2 * 4 * 3


def test_slow_messages_cost_what_the_way_there_and_back_takes() -> None:
    """One micro-batch through p ranks waits for 2(p - 1) messages."""
    for stages in (2, 4):
        without, with_messages = (
            max(event.end_s for event in simulate(schedule("1f1b", stages, 1, 1), ActionTimes(send=send)))
            for send in (0.0, 0.25)
        )
        assert with_messages - without == pytest.approx(2 * (stages - 1) * 0.25)


def test_lists_that_wait_for_each_other_are_named() -> None:
    receive = Action("receive", 1, 0, 0, "activation")
    with pytest.raises(AssertionError, match=r"deadlock: rank 1 waits .* receive the activation of micro-batch 0"):
        simulate([[Action("forward", 0, 0)], [receive, Action("forward", 1, 0)]])


def test_nothing_has_no_bubble() -> None:
    assert bubble([]).ratio == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_events_are_those_of_a_plain_simulation(kind: str) -> None:
    """To the bit, with times of each chunk."""
    chunks, random = chunks_per_rank(kind), Random(0)
    for stages, micro_batches in ((1, 2), (2, 5), (3, 6), (4, 8)):
        if [*schedule_problems(kind, stages, chunks, micro_batches)]:
            continue
        each = {name: tuple(random.random() for _ in range(stages * chunks)) for name in CHUNK_TIMES}
        times = ActionTimes(**each, update=random.random())  # type: ignore[arg-type]
        lists = schedule(kind, stages, chunks, micro_batches)
        events = simulate(lists, times)
        assert events == simulate_plainly(lists, times)
        assert events != simulate_plainly(lists, replace(times, send=0.0)) or stages == 1, "control"
