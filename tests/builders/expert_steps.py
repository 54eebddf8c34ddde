"""Steps of small decoders with experts in some layout, as each process of a group sees them, and in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from builders.parallel_steps import steps_of
from builders.planned_memory import counted_states
from builders.small_experts import BIASED, KINDS, MIXTRAL, experts_config, small_moe
from danlu.assembly.optimizer import optimizer_of
from danlu.core.memory_parts import MemoryParts
from danlu.numerics.arithmetic import Fp8Arithmetic
from danlu.numerics.batch_invariant import batch_invariant
from danlu.parallel.comm import Group
from danlu.parallel.expert import Exchange
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.planning.rank_memory import rank_states
from danlu.recipe import load
from danlu.run.read_workload import read_workload
from danlu.stages.placed import PlacedDecoder
from danlu.training.state import restore
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.step_traffic import StepTraffic, measure_step_traffic
from danlu.verification.trace import (
    LocalShards,
    StepTrace,
    Trace,
    save_checkpoint,
    trace_resumed_step,
    trace_step,
    trace_training,
    weight_shards,
)

Case = tuple[str, str]
"""A recipe's file, and the kind of experts of its model."""
_KINDS = KINDS | {"biased, even": replace(BIASED, num_experts=4)}


def see(cases: Sequence[Case], packs: int, micro: int, world: int | None = None) -> list[Trace]:
    """Worker: what this process sees of two steps of each case; alone where `world` is 1."""
    torch.set_num_threads(1)
    return [_see(file, kind, packs, micro, world) for file, kind in cases]


def _see(file: str, kind: str, packs: int, micro: int, world: int | None) -> Trace:
    training = _training(file, kind, micro, world)
    steps = steps_of(2, packs)
    return trace_training(training, training.run(steps), len(steps), steps_of(1, 3)[0])


def traffic(cases: Sequence[Case], packs: int, micro: int) -> list[StepTraffic]:
    """Worker: what this process sends in a step of each case, counted and predicted."""
    torch.set_num_threads(1)
    return [measure_step_traffic(_training(*case, micro, None), steps_of(1, packs)[0]) for case in cases]


def memory(cases: Sequence[Case]) -> list[tuple[MemoryParts, MemoryParts]]:
    """Worker: what a step of each case holds on this process, counted of the placed model, and foreseen."""
    torch.set_num_threads(1)
    found = []
    for file, kind in cases:
        training = _training(file, kind, 1, None)
        placed, layout = training.placed, training.ranks.layout
        assert isinstance(placed, PlacedDecoder)
        optimizer = optimizer_of(placed.parameters(), training.recipe, torch.device("cpu"))
        counted, _ = counted_states(placed, optimizer)
        judges = layout.tensor == 1 and training.recipe.parallel.shard == "none"
        workload = read_workload(training.recipe, placed.model.config, judges=judges)
        found.append((counted, rank_states(workload, layout).parts))
    return found


def resumed(first: str, second: str, kind: str, folder: str) -> tuple[LocalShards, StepTrace, Trace]:
    """Worker: the weights that one layout saved, its next step, and what another made of its checkpoint."""
    torch.set_num_threads(1)
    steps = steps_of(2, 5)
    training = _training(first, kind, 1, None)
    run = training.run(steps, Path(folder))
    trace_step(training, run)
    saved = weight_shards(training)
    checkpoint = save_checkpoint(run)
    following = trace_step(training, run)
    other = _training(second, kind, 1, None, resumed=checkpoint)
    trace = Trace()
    resumed_run = other.run(steps)
    restore(resumed_run, checkpoint)
    trace_resumed_step(other, resumed_run, trace)
    return saved, following, trace


def _training(file: str, kind: str, micro: int, world: int | None, resumed: Path | None = None) -> ProxyTraining:
    recipe = load(Path(file)).recipe
    layout = Layout() if world == 1 else layout_of(recipe.parallel, torch.distributed.get_world_size())
    config = experts_config(_KINDS[kind], vocab_size=400)
    device = torch.device("cpu")
    return ProxyTraining(recipe, Proxy(config), _groups(layout), device, micro=micro, resumed=resumed)


def exchanged(tokens_by_rank: Sequence[int], num_experts: int) -> dict[str, bool]:
    """Worker: what comes of rows that each rank sends to experts which multiply by their number plus one."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    exchange = Exchange(Group("expert", tuple(range(size)), rank, torch.distributed.group.WORLD))
    generator = torch.Generator().manual_seed(rank)
    # The second expert of all gets nothing from anybody.
    experts = torch.randint(0, num_experts - 1, (tokens_by_rank[rank],), generator=generator)
    experts = (experts + (experts > 0)).sort().values
    rows = torch.randn(len(experts), 3, generator=generator, dtype=torch.float64).requires_grad_()
    counts = torch.bincount(experts, minlength=num_experts)
    arrived, here, _ = exchange.dispatch(rows, counts)
    local = num_experts // size
    factors = torch.repeat_interleave(torch.arange(local) + local * rank + 1, here).double().unsqueeze(1)
    returned = exchange.combine(arrived * factors)
    returned.backward(torch.arange(returned.numel()).view_as(returned).double())
    assert rows.grad is not None
    wanted = (experts + 1).unsqueeze(1)
    weights = torch.arange(rows.numel()).view_as(rows).double()
    every_count = torch.stack(_all_counts(counts, size))
    return {
        "rows come back in their places": torch.equal(returned, rows * wanted),
        "gradients come back in their places": torch.equal(rows.grad, weights * wanted),
        "counts are those of all ranks": torch.equal(here, every_count.sum(0)[local * rank : local * (rank + 1)]),
        "rows have been elsewhere": not torch.equal(arrived, rows) if len(rows) else True,
    }


def sent_as_codes(activations: str, mixes_scales: bool) -> dict[str, float]:
    """Worker: largest differences between experts of two ranks, to which rows travel in FP8, and those of one process.

    mixes_scales: with a mistake, the scales of a row's tiles in another order.
    """
    rank, dtype = torch.distributed.get_rank(), getattr(torch, activations)
    one = small_moe(replace(MIXTRAL, num_experts=4, intermediate_size=136), 160)
    many = copy.deepcopy(one)
    own = slice(2 * rank, 2 * rank + 2)
    for experts in (one.experts, many.experts):
        for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
            linear.arithmetic = _MixedScales("tile") if mixes_scales and experts is many.experts else _TILE
    many.experts.exchange = Exchange(Group("expert", (0, 1), rank, torch.distributed.group.WORLD))
    for parameter in many.experts.parameters():
        parameter.data = parameter.data[own].clone()
    generator = torch.Generator().manual_seed(rank)
    # Tiles of very different sizes, and of the second rank fewer tokens.
    tokens = (torch.randn(37 - 20 * rank, 160, generator=generator) * torch.logspace(-1, 1, 160)).to(dtype)
    grad = torch.randn(tokens.shape, generator=generator).to(dtype)
    results = []
    with batch_invariant():
        for moe in (one, many):
            x = tokens.clone().requires_grad_()
            y = moe(x)
            y.backward(grad)
            assert x.grad is not None and moe.router.weight.grad is not None
            results.append((y.detach(), x.grad, moe.router.weight.grad))
    differences = {
        name: float((a.float() - b.float()).abs().max())
        for name, a, b in zip(("outputs", "gradients of inputs", "gradients of the router"), *results, strict=True)
    }
    for name, parameter in one.experts.named_parameters():
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        of_many = many.experts.get_parameter(name).grad
        assert of_many is not None
        differences[name] = float((of_many - parameter.grad[own]).norm() / parameter.grad[own].norm())
    return differences


class _MixedScales(Fp8Arithmetic):
    def to_bytes(self, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        return super().to_bytes((kept[0], kept[1].flip(1)))


_TILE = Fp8Arithmetic("tile")


def _all_counts(counts: torch.Tensor, size: int) -> list[torch.Tensor]:
    every = [torch.empty_like(counts) for _ in range(size)]
    torch.distributed.all_gather(every, counts)
    return every


@functools.cache
def _groups(layout: Layout) -> Ranks:
    return ranks_of(layout, "cpu")
