"""Bytes that come and go in a step: counts of schedules, steps worked out by hand, and each part by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from danlu.parallel.schedules import (
    KINDS,
    Action,
    chunks_per_rank,
    peak_in_flight,
    placement,
    schedule,
    schedule_problems,
    unsplit,
)
from danlu.parallel.weight_stash import WeightStash
from danlu.planning.layer_memory import PassBytes
from danlu.planning.pipeline_simulation import in_flight_formula
from danlu.planning.step_walk import ChunkCost, RankCost, StageWalk, rank_bytes, stashed_versions, walk

VARIANTS = [(kind, chunks_per_rank(kind)) for kind in KINDS] + [("interleaved", 3)]
ONE = ChunkCost(forward=1, input=1, weight=1, kept=1, forward_peak=1, backward_peak=1, input_peak=1)
SPLIT = replace(ONE, kept_for_weight=1, weight_peak=1)


def sizes(kind: str, chunks: int) -> Iterator[tuple[int, int]]:
    for stages in (1, 2, 3, 5):
        for micro_batches in (1, 2, 3, 5, 10):
            if not [*schedule_problems(kind, stages, chunks, micro_batches)]:
                yield stages, micro_batches


def put_off(actions: Sequence[Action]) -> int:
    """The most (chunk, micro-batch) pairs that are between their input and their weight pass."""
    waiting, most = set[tuple[Any, Any]](), 0
    for action in actions:
        if action.kind == "input":
            waiting.add((action.chunk, action.micro))
        most = max(most, len(waiting))
        if action.kind == "weight":
            waiting.remove((action.chunk, action.micro))
    return most


@pytest.mark.parametrize(("kind", "chunks"), VARIANTS)
def test_counts_of_schedules_follow_from_unit_bytes(kind: str, chunks: int) -> None:
    for stages, micro_batches in sizes(kind, chunks):
        lists = schedule(kind, stages, chunks, micro_batches)
        both = walk(lists, [SPLIT] * stages * chunks)
        waiting = [[ChunkCost(kept_for_weight=1, weight_peak=1)] * stages * chunks] * micro_batches
        sending = [[ChunkCost(message=1)] * stages * chunks] * micro_batches
        for rank, actions in enumerate(lists):
            formula = in_flight_formula(kind, rank, stages, chunks, micro_batches)[1]
            assert both[rank].peak == formula == peak_in_flight(actions)
            queue = max(moment.queue for moment in rank_bytes(actions, waiting))
            assert queue == put_off(actions)
            if kind == "zb-h1":
                assert queue == min(micro_batches, rank + 1)
            assert any(moment.messages for moment in rank_bytes(actions, sending)) == (stages * chunks > 1)
            assert len(both[rank].bytes) == len(both[rank].events) == len(actions)


def test_every_byte_has_gone_at_the_end() -> None:
    """All parts of every schedule end with what is there to the end: gradients, and messages on their way."""
    for kind, chunks in VARIANTS:
        lists = schedule(kind, 4, chunks, 8)
        cost = replace(SPLIT, gradients=100, message=0, frozen_message=0, gathered=3, loss=7)
        for each, held in zip(walk(lists, [cost] * 4 * chunks), placement(kind, 4, chunks), strict=True):
            assert each.bytes[-1] == 100 * len(held)


# Bytes by which each part of a hand-made step can be told from the others.
COST = ChunkCost(
    forward=1,
    input=1,
    weight=1,
    kept=10,
    forward_peak=13,
    backward_peak=16,
    input_peak=15,
    kept_for_weight=6,
    weight_peak=7,
    gradients=1000,
    gradients_of_input=200,
    message=2,
)


def test_1f1b_worked_out_by_hand() -> None:
    """Two ranks, two micro-batches. The last rank's gradients are held from its forward pass on, as the head's are."""
    last = replace(COST, loss=30, gradients_of_forward=400)
    first, second = walk(schedule("1f1b", 2, 1, 2), [COST, last])
    assert [(event.kind, event.micro) for event in first.events] == [
        ("forward", 0),
        ("send", 0),
        ("forward", 1),
        ("send", 1),
        ("receive", 0),
        ("backward", 0),
        ("receive", 1),
        ("backward", 1),
        ("reduce", None),
        ("update", None),
    ]
    # Outputs are among the kept 10; the received gradient (2) is among the 16 of the backward pass. Sent outputs are
    # still on their way when the backward pass is over: no more than four messages are waited for.
    assert first.bytes == (13, 10, 10 + 13, 20, 22, 10 + 16 + 1000, 10 + 2 + 2 + 1000, 2 + 16 + 1000, 1004, 1004)
    assert [(event.kind, event.micro) for event in second.events] == [
        ("receive", 0),
        ("forward", 0),
        ("receive", 1),
        ("backward", 0),
        ("send", 0),
        ("forward", 1),
        ("backward", 1),
        ("send", 1),
        ("reduce", None),
        ("update", None),
    ]
    received, at_loss, head = 2, 10 + 30, 400
    assert second.bytes == (
        received,
        at_loss + head,
        10 + received + head,
        16 + received + 1000,
        2 + received + 1000,
        2 + at_loss + head + 1000,
        2 + 16 + 1000,
        2 + 2 + 1000,
        2 + 2 + 1000,
        2 + 2 + 1000,
    )
    assert second.peak == second.bytes[second.index] == 1442
    assert second.parts._asdict() == {
        "activations": 10,
        "logits": 430,
        "gradients": 1000,
        "gathered": 0,
        "stash": 0,
        "queue": 0,
        "messages": 2,
    }


def test_every_schedule_worked_out_by_hand() -> None:
    """The most bytes of each of two ranks, without gradients and messages; micro-batches are as few as show it."""
    cost = replace(COST, gradients=0, gradients_of_input=0, message=0)
    by_hand = {
        # one micro-batch at a time: its backward pass
        ("naive", 1, 3): (16, 16),
        # the first backward pass, while two more are kept
        ("gpipe", 1, 3): (20 + 16, 20 + 16),
        ("1f1b", 1, 3): (10 + 16, 16),
        ("pipedream", 1, 3): (10 + 16, 16),
        # FF FF of two chunks and two micro-batches; then one in steady state: BF on the first rank. The second one has
        # 2 + 0 forward passes ahead, F, and then its backward passes.
        ("interleaved", 2, 2): (4 * 10 - 10 + 16, 3 * 10 - 10 + 16),
        # F F I W: nothing waits on the first rank. F I F I: on the second one a weight gradient waits by then.
        ("zb-h1", 1, 3): (10 + 15, 6 + 15),
        # rank 0: F F F of the first chunk, F of the second; then F of the second and I. rank 1: F F, F of both chunks,
        # of which one goes back: 3 others.
        ("zbv", 2, 4): (3 * 10 + 15, 3 * 10 + 15),
        # 2p + 1 are kept when the steady state's first whole backward pass begins.
        ("dualpipev", 2, 4): (4 * 10 + 16, 4 * 10 + 16),
    }
    assert {kind for kind, _, _ in by_hand} == set(KINDS)
    found = {
        (kind, chunks, count): tuple(each.peak for each in walk(schedule(kind, 2, chunks, count), [cost] * 2 * chunks))
        for kind, chunks, count in by_hand
    }
    assert found == by_hand


def test_what_is_handed_over_on_one_rank_is_there_once() -> None:
    """The second chunk's input is the first one's output."""
    cost = ChunkCost(kept=10, forward_peak=13, backward_peak=16, message=2)
    (alone,) = walk(schedule("interleaved", 1, 2, 1), [cost, cost])
    # The gradient of its input waits through the sum of gradients, and is then among the 16 of the next backward pass.
    assert [event.kind for event in alone.events[:5]] == ["forward", "forward", "backward", "reduce", "backward"]
    assert alone.bytes[:5] == (13, 10 + 13 - 2, 10 + 16 - 2, 10 + 2, 16)


def test_one_process_without_a_pipeline() -> None:
    cost = ChunkCost(
        kept=10, forward_peak=13, loss=30, backward_peak=50, first_backward=PassBytes(20, 900), gradients=1000
    )
    (alone,) = walk([unsplit(2)], [cost])
    assert alone.bytes == (40, 920, 1040, 1050, 1000, 1000)
    (unknown,) = walk([unsplit(2)], [replace(cost, first_backward=None)])
    assert unknown.bytes[1] == 1050  # as if all of them were there


def test_gathered_parameters_are_there_for_a_pass_or_from_the_first_to_the_last() -> None:
    cost = ChunkCost(kept=1, forward_peak=1, backward_peak=1, gathered=100)
    (each,) = walk([unsplit(2)], [cost])
    assert each.bytes == (101, 101, 101, 101, 0, 0)
    (kept,) = walk([unsplit(2)], [cost], [RankCost(keeps_gathered=True)])
    assert kept.bytes == (101, 101, 101, 101, 0, 0)
    lists = schedule("gpipe", 2, 1, 2)
    by_pass, throughout = (walk(lists, [cost] * 2, [RankCost(keeps_gathered=keeps)] * 2)[0] for keeps in (False, True))
    receive = [event.kind for event in by_pass.events].index("receive")
    assert by_pass.bytes[receive] == 2 and throughout.bytes[receive] == 102


def test_versions_of_weights_are_those_of_the_stash() -> None:
    for micro_batches in (1, 2, 3, 9):
        for delay in range(5):
            stash = WeightStash([Parameter(torch.zeros(1))], micro_batches, delay)
            for newest in range(1, micro_batches + 1):
                stash.before_update()
                assert stashed_versions(newest, micro_batches, delay) == stash.num_versions - 1
    lists = schedule("pipedream", 4, 1, 9)
    walks = walk(lists, [COST] * 4, [RankCost(trained=10**6, weight_delay=3 - rank) for rank in range(4)])
    assert [each.parts.stash // 10**6 for each in walks] == [3, 2, 1, 0]
    assert all(each.parts.gradients == 1000 for each in walks), "the update takes them away"


def test_whole_gradients_are_there_in_one_pass_alone() -> None:
    """A stage with two chunks has those of one layer of one chunk at a time; the gradients of shards stay."""
    cost = replace(COST, gradients_of_input=1000, message=0)
    lists = schedule("interleaved", 2, 2, 4)
    plain, whole, kept = (
        walk(lists, [each] * 4)[0]
        for each in (cost, replace(cost, whole_gradients=700), replace(cost, gradients=1700, gradients_of_input=1700))
    )
    makes_gradients = [event.kind == "backward" for event in whole.events]
    assert whole.bytes == tuple(total + 700 * makes for total, makes in zip(plain.bytes, makes_gradients, strict=True))
    assert whole.parts.gradients == 2 * 1000 + 700
    assert kept.parts.gradients == 2 * 1700, "control: those of both chunks, to the end of the step"


def test_micro_batches_may_differ() -> None:
    large, small = (ChunkCost(forward=size, kept=size, forward_peak=size, backward_peak=size) for size in (9, 5))
    (alone,) = walk([unsplit(3)], [[small], [large], [small]])
    assert alone.bytes == (5, 5, 9, 9, 5, 5, 0, 0) and alone.index == 2
    assert [event.end_s for event in alone.events][:6] == [5, 5, 14, 14, 19, 19]
    first, _ = walk(schedule("gpipe", 2, 1, 3), [[small, large], [large, small], [small, small]])
    assert first.peak == 9 + 5 + 5


EVERY = replace(
    COST,
    backward=2.5,
    whole_gradients=30,
    send=0.5,
    reduce=0.5,
    gathered=50,
    reduce_buffer=70,
    frozen_message=3,
    first_backward=PassBytes(15, 500),
    first_weight=PassBytes(6, 600),
)
LAST = replace(EVERY, loss=40, gradients_of_forward=150)


@pytest.mark.parametrize("part", [field.name for field in fields(ChunkCost)])
def test_each_part_of_a_cost_matters(part: str) -> None:
    """Control: without it, the bytes or the seconds of a step are others."""
    lists = schedule("dualpipev", 2, 2, 5)  # has passes of all kinds
    without = None if part.startswith("first") or part == "backward" else 0
    ranks = [RankCost(update=1.0)] * 2
    costs = [EVERY, EVERY, EVERY, LAST]
    whole, changed = (
        walk(lists, of_chunks, ranks) for of_chunks in (costs, [replace(each, **{part: without}) for each in costs])
    )

    def of(walks: Sequence[StageWalk]) -> list[Any]:
        return [(each.bytes, [event.end_s for event in each.events]) for each in walks]

    assert of(whole) != of(changed), part


@pytest.mark.parametrize("part", [field.name for field in fields(RankCost)])
def test_each_part_of_a_rank_matters(part: str) -> None:
    lists = schedule("pipedream" if part in ("trained", "weight_delay") else "1f1b", 2, 1, 4)
    rank = RankCost(update=1.0, trained=3, weight_delay=1)
    other = not rank.keeps_gathered if part == "keeps_gathered" else 0
    whole, changed = (walk(lists, [EVERY] * 2, [each] * 2)[0] for each in (rank, replace(rank, **{part: other})))
    assert (whole.bytes, whole.events) != (changed.bytes, changed.events), part
