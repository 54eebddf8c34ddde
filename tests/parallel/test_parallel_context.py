"""What is summed together after the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.shard_box import ShardBox
from danlu.parallel.comm import Group
from danlu.parallel.layout import Layout
from danlu.parallel.local_parameter import LocalParameter
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.ranks import Ranks


@dataclass(frozen=True)
class Doubling(Group):
    """A group of two that have the same gradients."""

    sums: list[tuple[str, int]] = field(default_factory=list)

    def sum(self, x: Tensor) -> Tensor:
        self.sums.append((x.device.type, x.numel()))
        return x.mul_(2)


def held(name: str, size: int, device: str) -> LocalParameter:
    parameter = Parameter(torch.zeros(size, device=device))
    parameter.grad = torch.ones(size, device=device)
    return LocalParameter(name, parameter, parameter, ShardBox.full((size,)))


def test_gradients_of_offloaded_shards_and_of_whole_parameters_are_summed_apart() -> None:
    # The meta device stands for a GPU. One collective for each device, in the same order on every process.
    every = {one.name: one for one in (held("a", 3, "cpu"), held("norm", 5, "meta"), held("b", 4, "cpu"))}
    group = Doubling("tensor", (0, 1))
    parallel = ParallelContext(Ranks(Layout(tensor=2)), every, tuple((group, name) for name in every))
    parallel.reduce_gradients()
    assert group.sums == [("cpu", 7), ("meta", 5)]
    assert [every[name].local.grad.tolist() for name in ("a", "b")] == [[2.0] * 3, [2.0] * 4]  # type: ignore[union-attr]


def test_a_step_through_stages_has_two_micro_batches_for_each_of_them() -> None:
    data = Group("data", (0, 1))
    stages = ParallelContext(Ranks(data=data), pipeline=Pipeline("1f1b", 1, Group("pipeline", (0, 2))))
    assert [stages.least_micro_batches(items) for items in (100, 8, 5, 1)] == [4, 4, 3, 1]
    assert ParallelContext(Ranks(data=data)).least_micro_batches(100) == 1
