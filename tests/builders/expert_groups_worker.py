"""A model of which data ranks have other experts, without any exchange: for tests of groups of parameters.

Each rank puts its own rows through the dense layers, which all have, and through its own experts. Runs inside of a
group of processes (`builders.process_group`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.core.shard_box import ShardBox
from danlu.numerics.relative_error import relative_error
from danlu.optim.gradients import clip_grad_norm
from danlu.parallel import data
from danlu.parallel.layout import Layout
from danlu.parallel.local_parameter import local_parameters_of, sums_over_data
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import ranks_of
from danlu.recipe.sections import Parallel

WIDTH, INNER = 4, 8
Case = tuple[Parallel, Layout, int, str]
"""Section, layout, number of experts, and what is done wrong: experts are treated as if "all data ranks" had the same
ones, or their squares are counted so ("copies")."""


class _Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("td,efd->te", x, self.weight.tanh())


class _Layer(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = _Experts(count)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x).tanh()
        return x + self.experts(x).sum(1, keepdim=True)


class _Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": _Layer(count), "1": _Layer(count)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.square().sum()


def _values(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(one.shape, generator=generator) for name, one in model.named_parameters()}


def _rows(rank: int) -> Tensor:
    return torch.randn(3 + rank, WIDTH, generator=torch.Generator().manual_seed(rank))


def _own_experts(layout: Layout, experts: int, rank: int) -> tuple[int, int]:
    """First expert and number of experts of a data rank."""
    count = experts // layout.expert
    return rank % layout.expert * count, count


def _wanted(layout: Layout, experts: int) -> dict[str, Tensor]:
    """Gradients of the whole model: each rank's rows through all dense parameters, and through its experts."""
    whole = _Model(experts)
    values = _values(whole)
    sums = {name: torch.zeros_like(value) for name, value in values.items()}
    for rank in range(layout.world):
        first, count = _own_experts(layout, experts, rank)
        part = _Model(count)
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                parameter.copy_(values[name][first : first + count] if "experts" in name else values[name])
        part(_rows(rank)).backward()
        for name, parameter in part.named_parameters():
            into = sums[name][first : first + count] if "experts" in name else sums[name]
            into += parameter.grad
    return sums


@dataclass(frozen=True)
class Seen:
    errors: Mapping[str, float]  # of each local gradient
    boxes: Mapping[str, ShardBox]
    norms: tuple[float, float]  # by the processes together, and of the whole


def see(cases: Sequence[Case]) -> list[Seen]:
    """Worker: gradients and norm of each case against those of the whole."""
    torch.set_num_threads(1)
    return [_see(*case) for case in cases]


def _see(section: Parallel, layout: Layout, experts: int, wrong: str) -> Seen:
    rank, ranks = dist.get_rank(), ranks_of(layout, "cpu")
    first, count = _own_experts(layout, experts, rank)
    model = _Model(count)
    values = _values(_Model(experts))
    names = {name for name in values if "experts" in name}
    boxes = {name: ShardBox.full(values[name].shape).narrow(0, first, count) for name in names}
    seen_ranks = replace(ranks, expert_data=ranks.dense_data) if wrong else ranks
    if section.shard != "none":
        sharder = data.Sharder(model, seen_ranks, section, gathered=None, whole=(), expert_names=names)
        for name, layer in model.layers.items():
            sharder.layer(f"layers.{name}", layer)
        sharder.rest(list(model.layers.values()))
    local = local_parameters_of(model, seen_ranks, boxes, names)
    if wrong == "copies":  # gradients are summed rightly, and squares as those of what all data ranks have
        local |= {name: replace(local[name], data_groups=ranks.expert_data) for name in names}
    with torch.no_grad():
        for name, one in local.items():
            one.local.copy_(one.box.view_of(values[name]))
    sums = tuple(sums_over_data(local, ranks, in_buckets=section.shard == "none"))
    parallel = ParallelContext(seen_ranks, local, sums)
    if section.shard == "none":
        parallel = data.replicated_step(parallel, section)
    else:
        parallel = data.sharded_step(parallel, model, section)
    loss = model(_rows(rank))
    parallel.prepare_backward(True, 0)
    loss.backward()
    parallel.reduce_gradients()
    wanted = _wanted(layout, experts)
    errors = {
        name: relative_error(one.local.grad, one.box.view_of(wanted[name]), wanted[name])
        for name, one in local.items()
        if one.local.grad is not None and one.local.numel()
    }
    holders = [one.local for one in local.values()]
    norm = clip_grad_norm(holders, None, group=ranks.world, norm_weights=parallel.norm_weights())
    whole = sum(float(gradient.square().sum()) for gradient in wanted.values()) ** 0.5
    return Seen(errors, {name: one.box for name, one in local.items()}, (norm, whole))
