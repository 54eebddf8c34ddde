"""Which version of the weights each pass of PipeDream uses, by the lists that run, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Parameter

from danlu.parallel.comm import Group
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.schedules import Action
from danlu.parallel.weight_stash import WeightStash

PIPELINES = [(stages, sync) for stages in (2, 3, 4) for sync in (False, True)]


def ranks_of(stages: int, sync: bool) -> Iterator[Pipeline]:
    for rank in range(stages):
        group = Group("pipeline", tuple(range(stages)), rank)
        yield Pipeline("pipedream", 1, group, vertical_sync=sync)


def updated(stash: WeightStash, weight: Parameter) -> None:
    stash.before_update()
    with torch.no_grad():
        weight.add_(1)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 9])
@pytest.mark.parametrize(("stages", "sync"), PIPELINES)
def test_both_passes_of_a_micro_batch_see_the_version_of_the_formula(
    stages: int, sync: bool, micro_batches: int
) -> None:
    for rank, pipeline in enumerate(ranks_of(stages, sync)):
        weight = Parameter(torch.zeros(2))  # counts its updates
        stash = WeightStash([weight], micro_batches, pipeline.weight_delay)
        most, newest = 1, 0
        for action in pipeline.actions(micro_batches):
            match action:
                case Action(kind="forward" | "backward" as kind, micro=int(micro)):
                    with stash.in_place(micro):
                        # w1(t-n+1), w2(t-n+2), .., wn(t), with stages counted from 1; or all of them t-n+1.
                        formula = micro - stages + 1 + (0 if sync else rank)
                        assert weight.tolist() == [max(0, formula)] * 2
                    if kind == "forward" and not sync:
                        assert stash.version_of(micro) == newest
                case Action(kind="update"):
                    updated(stash, weight)
                    newest += 1
                    most = max(most, stash.num_versions)
            assert weight.tolist() == [newest] * 2
        in_flight = stages - (0 if sync else rank)
        # In a short turn several micro-batches have the version that it began with.
        assert most <= min(micro_batches, in_flight) and (micro_batches < 9 or most == in_flight)
        assert stash.num_versions == 1


@pytest.mark.parametrize("view", [True, False])
def test_autograd_sees_the_version_that_is_in_place_and_no_other(view: bool) -> None:
    """What it saves of a weight is the parameter itself, or a view of the memory that the parameter had."""
    for in_place in (True, False):
        weight = Parameter(torch.ones(2, 2))
        stash = WeightStash([weight], 4, 1)
        with stash.in_place(1):
            x = torch.ones(1, 2, requires_grad=True)
            y = F.linear(x, weight) if view else x * weight
        updated(stash, weight)
        updated_twice = weight.detach().clone()
        if in_place:
            with stash.in_place(1):
                y.sum().backward()
            assert x.grad is not None and x.grad.tolist() == [[2.0, 2.0]]
            assert weight.grad is not None and torch.equal(weight, updated_twice)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_the_newest_version_comes_back_after_an_error() -> None:
    weight = Parameter(torch.zeros(1))
    stash = WeightStash([weight], 4, 1)
    updated(stash, weight)
    seen = []

    def fail() -> None:
        with stash.in_place(0):
            seen.append(weight.item())
            raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        fail()
    assert (seen, weight.item()) == ([0], 1)


def test_a_flush_leaves_the_newest_version_alone() -> None:
    weight = Parameter(torch.zeros(1))
    stash = WeightStash([weight], 9, 3)
    for _ in range(3):
        updated(stash, weight)
    assert stash.num_versions == 4
    stash.clear()
    assert stash.num_versions == 1 and weight.item() == 3


def test_other_schedules_have_one_version() -> None:
    group = Group("pipeline", (0, 1), 0)
    assert Pipeline("1f1b", 1, group).weight_delay == 0 and not Pipeline("1f1b", 1, group).updates_each_micro_batch
    assert Pipeline("pipedream", 1, group).weight_delay == 1
    assert not ParallelContext().updates_each_micro_batch  # one process
