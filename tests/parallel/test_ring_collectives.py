"""Rings against torch's collectives, and what they send against the formula."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from builders import ring_collectives
from builders.process_group import run_group
from builders.ring_collectives import Step, gather_steps, reduce_steps
from builders.ring_worker import Outcome, compared, summed_floats, with_wrong_neighbours

from danlu.parallel.comm import ALONE

SHARES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@pytest.fixture(scope="module", params=[2, 3, 4])
def outcomes(request: pytest.FixtureRequest) -> list[list[Outcome]]:
    """Of every collective, by process."""
    return run_group(compared, request.param)


@pytest.mark.distributed
def test_results_are_those_of_torch(outcomes: list[list[Outcome]]) -> None:
    for rank, found in enumerate(outcomes):
        for one in found:
            assert one.ours.dtype == one.theirs.dtype and torch.equal(one.ours, one.theirs), (rank, one)


@pytest.mark.distributed
def test_each_process_sends_what_the_formula_says(outcomes: list[list[Outcome]]) -> None:
    size, seen = len(outcomes), set()
    for together in zip(*outcomes, strict=True):
        first = together[0]
        if first.alike:
            seen.add(first.name)
            share = SHARES[first.name] * Fraction(size - 1, size)
            assert [one.sent_bytes for one in together] == [share * one.full_bytes for one in together], first.name
        elif first.name == "all_to_all":
            continue
        else:  # one process sends a little more than another, and all of them the same as if all were alike
            assert sum(one.sent_bytes for one in together) == SHARES[first.name] * (size - 1) * first.full_bytes
    assert seen == SHARES.keys()


@pytest.mark.distributed
def test_what_is_said_to_be_sent_is_what_is_seen_on_the_way(outcomes: list[list[Outcome]]) -> None:
    assert all(one.sent_bytes == one.counted_bytes for found in outcomes for one in found)
    assert any(one.sent_bytes for found in outcomes for one in found)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [3, 4])
def test_wrong_neighbours_are_noticed(size: int) -> None:
    for found in run_group(with_wrong_neighbours, size):
        for ours, theirs in found:
            assert not torch.equal(ours, theirs)


@pytest.mark.distributed
def test_floats_are_added_around_the_ring_and_all_get_the_same_bits() -> None:
    found = run_group(summed_floats, 3)
    given = [x.tensor_split(3) for x, _ in found]
    # Chunk c starts at process c + 1 and comes home to c.
    around = torch.cat([given[c][c] + (given[(c + 2) % 3][c] + given[(c + 1) % 3][c]) for c in range(3)])
    another_way = torch.cat([given[0][c] + given[1][c] + given[2][c] for c in range(3)])
    for _, ours in found:
        assert torch.equal(ours, around)
    assert not torch.equal(around, another_way)


def test_alone_nothing_is_sent() -> None:
    x = torch.arange(6.0).view(3, 2)
    for call in (
        ring_collectives.all_reduce,
        ring_collectives.reduce_scatter,
        ring_collectives.all_gather,
        ring_collectives.all_to_all,
    ):
        moved = call(x, ALONE)
        assert torch.equal(moved.tensor, x) and moved.sent_bytes == 0
        assert moved.tensor.data_ptr() != x.data_ptr()


Steps = Callable[[int, int], list[Step]]


def left_after(steps: Steps, size: int, start: Callable[[int, int], set[int]]) -> list[list[set[int]]]:
    """Which processes' parts each process has of each chunk after the steps; what arrives joins what is there."""
    held = [[set(start(index, chunk)) for chunk in range(size)] for index in range(size)]
    for turn in range(size - 1):
        now = [steps(index, size)[turn] for index in range(size)]
        arriving = [set(held[(index - 1) % size][now[(index - 1) % size].sends]) for index in range(size)]
        for index, step in enumerate(now):
            assert step.receives == now[(index - 1) % size].sends, "a message that the other end takes for another"
            assert not held[index][step.receives] & arriving[index], "a part that is added twice"
            held[index][step.receives] |= arriving[index]
    return held


@pytest.mark.parametrize("size", range(1, 10))
def test_steps_bring_every_part_home_once(size: int) -> None:
    everyone = set(range(size))
    reduced = left_after(reduce_steps, size, lambda index, chunk: {index})
    assert [reduced[index][index] for index in range(size)] == [everyone] * size
    gathered = left_after(gather_steps, size, lambda index, chunk: {chunk} if index == chunk else set())
    assert gathered == [[{chunk} for chunk in range(size)]] * size


def test_one_wrong_step_of_one_process_is_noticed() -> None:
    def wrong(index: int, size: int) -> list[Step]:
        steps = reduce_steps(index, size)
        return [Step((steps[0].sends + 1) % size, steps[0].receives), *steps[1:]] if index == 2 else steps

    with pytest.raises(AssertionError, match="takes for another"):
        left_after(wrong, 5, lambda index, chunk: {index})
