"""What each process of the tests of traffic does: collectives of every kind, and steps of a decoder, counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from builders.tiny_adapters import adapter_set
from danlu.memory.recompute import plan_of, wrap
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.modules import Linear, RMSNorm
from danlu.models.presets import from_scratch
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.parallel import data
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.comm import Group
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.local_parameter import local_parameters_of
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.parallel.tensor import Cuts, cut
from danlu.parallel.traffic_counter import TrafficCounter
from danlu.planning.gradient_borders import TrainedNames
from danlu.planning.step_traffic import head_norms
from danlu.planning.traffic import TensorStep, Weight, data_traffic, decoder_regions, tensor_traffic
from danlu.recipe.sections import Lora, Model, Parallel, Recompute

HAS_LISTS = torch.__version__ >= "2.12"
"""Whether gloo exchanges lists of tensors."""

Counted = dict[str, tuple[list[CollectiveTraffic], list[CollectiveTraffic]]]
"""Name of a case -> (measured, formula)."""

VOCABULARY = 66  # rows, of which two are filled up among 4; of 45, three are
CONFIG = {
    "model_type": "llama",
    "hidden_size": 36,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def one_of_each() -> dict[str, list[CollectiveTraffic]]:
    """What each collective of torch is counted as, on 60 float32 numbers."""
    warnings.simplefilter("ignore", FutureWarning)  # old names, which this counts as well
    size, rank = dist.get_world_size(), dist.get_rank()
    group, x = dist.group.WORLD, torch.ones(60)
    parts = [torch.empty(60 // size) for _ in range(size)]
    own = torch.ones(60 // size)
    uneven = [[10, 40, 10], [40, 0, 20], [5, 25, 30]]
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))

    def send() -> None:
        waiting = dist.irecv(torch.empty(60), (rank - 1) % size)
        dist.send(x, (rank + 1) % size)
        assert waiting is not None
        waiting.wait()

    def exchange_uneven() -> None:
        receives = [row[rank] for row in uneven]
        dist.all_to_all_single(torch.empty(sum(receives)), x, receives, uneven[rank])

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_reduce bf16": lambda: dist.all_reduce(x.bfloat16()),
        "all_gather": lambda: dist.all_gather(parts, own),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(60), own),
        "reduce_scatter": lambda: dist.reduce_scatter(own.clone(), list(x.split(60 // size))),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(own.clone(), x),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(60), x),
        "all_to_all_single uneven": exchange_uneven,
        "all_to_all": lambda: dist.all_to_all(parts, list(x.split(60 // size))),
        "broadcast": lambda: dist.broadcast(x.clone(), 0),
        "reduce": lambda: dist.reduce(x.clone(), 0),
        "gather": lambda: dist.gather(own, parts if rank == 0 else None),
        "scatter": lambda: dist.scatter(own.clone(), list(x.split(60 // size)) if rank == 0 else None),
        "send": send,
        "barrier": dist.barrier,
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", group).sum(),
        "functional all_gather": lambda: functional.all_gather_tensor(own, 0, group).sum(),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, group).sum(),
        "functional all_to_all": lambda: functional.all_to_all_single(x, None, None, group).sum(),
        "DTensor, sum": lambda: DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Replicate()]),
        "DTensor, whole": lambda: DTensor.from_local(own, mesh, [Shard(0)]).full_tensor(),
        "in a backward pass": lambda: _Summed.apply(x.clone().requires_grad_()).sum().backward(),
        "nothing": lambda: x + x,
    }
    if not HAS_LISTS:
        del calls["all_to_all"]
    counted = {}
    for name, call in calls.items():
        with TrafficCounter(Layout(shard=size)) as traffic:
            call()
        counted[name] = traffic.counted()
    return counted


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def along_axes(layout: Layout) -> dict[str, list[CollectiveTraffic]]:
    """What a sum over each group of a layout is counted as, and one over a group that no axis is."""
    ranks = ranks_of(layout, "cpu")
    pairs = [dist.new_group([first, first + 1]) for first in range(0, layout.world, 2)]
    counted = {}
    for group in (ranks.world, ranks.data, ranks.replicate, ranks.shard, ranks.tensor):
        with TrafficCounter(layout) as traffic:
            group.sum(torch.ones(60))
        counted[group.name] = traffic.counted()
    with TrafficCounter(layout) as traffic:
        dist.all_reduce(torch.ones(60), group=pairs[ranks.rank // 2])
    return counted | {"a pair": traffic.counted()}


def case_name(section: Parallel, bf16: bool, rounds: int) -> str:
    parts = [section.shard, f"replicate {section.replicate}", f"accumulate {section.accumulate}"]
    return ", ".join([*parts, f"reduce {section.reduce}", "bf16" if bf16 else "fp32", f"{rounds} micro-batches"])


def steps(sections: Sequence[Parallel]) -> Counted:
    """A step of each section with one and with three micro-batches, in both types where nothing else is unusual."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    counted: Counted = {}
    for section in sections:
        ranks = ranks_of(layout_of(section, dist.get_world_size()), "cpu")
        for bf16 in (False, True) if section.accumulate == "auto" and section.prefetch else (False,):
            counted |= _steps(section, ranks, bf16)
    return counted


def small_model(**changes: Any) -> Decoder:
    model = build(from_scratch(Model(config=CONFIG | changes, tokenizer="none"), VOCABULARY, 1, 2))
    initialize(model, seed=0)
    return model


def _steps(section: Parallel, ranks: Ranks, bf16: bool) -> Counted:
    model = small_model()
    weights, parallel, apart = placed(model, section, ranks, bf16)
    return {
        case_name(section, bf16, rounds): (
            counted_step(model, parallel, ranks, apart, rounds, bf16),
            list(data_traffic(weights, ranks.layout, section, micro_batches=rounds)),
        )
        for rounds in (1, 3)
    }


def counted_step(
    model: Decoder, parallel: ParallelContext, ranks: Ranks, apart: Sequence[nn.Parameter], rounds: int, bf16: bool
) -> list[CollectiveTraffic]:
    with TrafficCounter(ranks.layout) as traffic:
        step(model, parallel, rounds, bf16)
        if apart:
            ranks.data.sum(torch.cat([one.grad.flatten() for one in apart if one.grad is not None]))
    return traffic.counted()


def with_frozen(names: Sequence[str]) -> Counted:
    """Steps where some parameters are frozen, as under adapters: gathered, and without gradients."""
    torch.set_num_threads(1)
    counted: Counted = {}
    for shard in ("none", "zero2", "zero3"):
        section = Parallel(shard=shard)  # type: ignore[arg-type]
        ranks = ranks_of(layout_of(section, dist.get_world_size()), "cpu")
        model = small_model()
        weights, parallel, apart = placed(model, section, ranks, False, frozen=names)
        measured = counted_step(model, parallel, ranks, apart, 2, False)
        counted[shard] = measured, list(data_traffic(weights, ranks.layout, section, micro_batches=2))
    return counted


def with_adapters() -> Counted:
    """Steps of LoRA over a base in four bits: codes are gathered, and only the adapter has gradients."""
    torch.set_num_threads(1)
    section = Parallel(shard="zero3")
    ranks = ranks_of(layout_of(section, dist.get_world_size()), "cpu")
    model = small_model()
    for module in list(model.layers.modules()):
        if isinstance(module, Linear):
            module.store(FourBitWeight.quantize(module.get_parameter("weight").detach()))
    adapters = adapter_set(model)
    adapters.add("new", Lora(rank=2))
    weights, parallel, _ = placed(model, section, ranks, False, frozen=[".weight"])
    adapters.refresh_copies()
    assert {one.gathered_bytes for one in weights} == {1, 4}
    measured = counted_step(model, parallel, ranks, [], 2, False)
    wide = [replace(one, gathered_bytes=4) for one in weights]
    return {
        "QLoRA": (measured, list(data_traffic(weights, ranks.layout, section, micro_batches=2))),
        "codes as float32": (measured, list(data_traffic(wide, ranks.layout, section, micro_batches=2))),
    }


def remade() -> Counted:
    """zero3 with activations that are made again: of each layer, and of all layers as one segment."""
    torch.set_num_threads(1)
    section = Parallel(shard="zero3")
    ranks = ranks_of(layout_of(section, dist.get_world_size()), "cpu")
    counted: Counted = {}
    for kind in ("selective", "full", "every"):
        model = small_model()
        wrap(model, plan_of(Recompute(kind=kind, layers=3 if kind == "every" else None), model))  # type: ignore[arg-type]
        weights, parallel, apart = placed(model, section, ranks, False)
        measured = counted_step(model, parallel, ranks, apart, 2, False)
        counted[kind] = measured, list(data_traffic(weights, ranks.layout, section, micro_batches=2))
    return counted


def placed(
    model: Decoder, section: Parallel, ranks: Ranks, bf16: bool, frozen: Sequence[str] = ()
) -> tuple[list[Weight], ParallelContext, list[nn.Parameter]]:
    """The model among data ranks: its weights as the formula sees them, this process's part in a step, and the
    norms, whose gradients are summed apart."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in frozen)
    apart = {f"{name}.weight": one.weight for name, one in model.named_modules() if isinstance(one, RMSNorm)}
    if section.shard == "none":
        parallel = ParallelContext(ranks, local_parameters_of(model, ranks, {}))
        return weights_of(model, bf16), data.replicated_step(parallel, section), []
    gathered = torch.bfloat16 if bf16 else None
    sharder = data.Sharder(model, ranks, section, gathered=gathered, whole=apart)
    for name, layer in model.layers.items():
        sharder.layer(f"layers.{name}", layer)
    sharder.rest(list(model.layers.values()))
    parallel = data.sharded_step(ParallelContext(ranks), model, section)
    return weights_of(model, bf16), parallel, list(apart.values())


def weights_of(model: nn.Module, bf16: bool) -> list[Weight]:
    return [
        Weight(
            tuple(parameter.shape),
            trained=parameter.requires_grad,
            sharded=isinstance(parameter, DTensor),
            gathered_bytes=2 if bf16 and parameter.is_floating_point() else parameter.element_size(),
            gathers=2 if name.startswith("layers.") else 1,
        )
        for name, parameter in model.named_parameters()
    ]


def step(model: Decoder, parallel: ParallelContext, rounds: int, bf16: bool) -> None:
    """Forward and backward passes; what comes out of a sum over processes that are not there means nothing."""
    for number in range(1, rounds + 1):
        loss = _loss(model, torch.arange(8), torch.bfloat16 if bf16 else torch.float32)
        parallel.prepare_backward(number == rounds, 0)
        loss.backward()
    parallel.finish_backward()


def _loss(model: Decoder, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    hidden = model(tokens, torch.arange(len(tokens)), PackedAttention((0, len(tokens))), dtype)
    # As the step does: the head's product reads the weight, outside of the head's own forward.
    return (hidden.float() @ model.head_weight.float().T).logsumexp(-1).sum()


TensorCase = tuple[Parallel, str, str]
"""Section, kind of recompute, family."""


def tensor_steps(cases: Sequence[TensorCase]) -> Counted:
    """Steps of a decoder that is cut among tensor ranks, and sharded among data ranks where there are some."""
    torch.set_num_threads(1)
    return {
        f"{family}, {section.shard}, sequence {section.sequence}, {'bf16' if bf16 else 'fp32'}, recompute {kind}": (
            tensor_step(section, ranks_of(layout_of(section, dist.get_world_size()), "cpu"), kind, family, bf16)
        )
        for section, kind, family in cases
        for bf16 in ((False, True) if kind == "none" else (False,))
    }


TOKENS, TARGETS, ROUNDS = 24, 10, 2


def tensor_step(
    section: Parallel, ranks: Ranks, kind: str, family: str, bf16: bool
) -> tuple[list[CollectiveTraffic], list[CollectiveTraffic]]:
    """A step as `train.step` makes it, with the head on the targets alone: (measured, formula)."""
    model = small_model(model_type=family, num_attention_heads=8, head_dim=6, intermediate_size=48)
    cuts = cut(model, None, ranks.tensor, sequence=section.sequence)
    plan = plan_of(Recompute(kind=kind), model)  # type: ignore[arg-type]
    wrap(model, plan, gathered=section.sequence)
    weights: list[Weight] = []
    parallel = ParallelContext()
    norms: list[nn.Parameter] = []
    if ranks.data.size > 1:
        weights, parallel, norms = placed(model, section, ranks, bf16)
    dtype = torch.bfloat16 if bf16 else torch.float32
    with TrafficCounter(ranks.layout) as traffic:
        for number in range(1, ROUNDS + 1):
            loss = _cut_loss(model, ranks.tensor, dtype)
            parallel.prepare_backward(number == ROUNDS, 0)
            loss.backward()
        parallel.finish_backward()
        partial = _sum_partial(model, cuts)
        if norms:
            ranks.data.sum(torch.cat([one.grad.flatten() for one in norms if one.grad is not None]))
    halves = range(2 * len(model.layers))
    said = TensorStep(
        tokens=ROUNDS * TOKENS,
        targets=ROUNDS * TARGETS,
        hidden_size=model.config.hidden_size,
        element_bytes=dtype.itemsize,
        regions=decoder_regions(
            [(one.kind, one.segment) for one in plan],
            gathered_again=halves if section.sequence and kind not in ("full", "every") else (),
            to_the_end=any(layer.post_mlp_norm is not None for layer in model.layers.values()),
        ),
        partial=partial,
        head_norms=ROUNDS * TOKENS * head_norms(model.config, plan, TrainedNames(()), 0),
    )
    formula = list(tensor_traffic(said, ranks.layout, section))
    return traffic.counted(), [*formula, *data_traffic(weights, ranks.layout, section, micro_batches=ROUNDS)]


def _cut_loss(model: Decoder, group: Group, dtype: torch.dtype) -> Tensor:
    tokens = torch.arange(TOKENS) % VOCABULARY
    hidden = model(tokens, torch.arange(TOKENS), PackedAttention((0, TOKENS)), dtype)
    assert model.vocab_shard is not None
    return linear_cross_entropy(
        hidden[:TARGETS],
        model.head_weight,
        torch.arange(TARGETS),
        torch.ones(TARGETS),
        tensor_group=group,
        vocab_start=model.vocab_shard.start,
        vocab_size=VOCABULARY,
    ).total


def _sum_partial(model: Decoder, cuts: Cuts) -> dict[int, int]:
    """Sums gradients that are parts of a sum, in one collective a group. Returns the numbers of each size of group."""
    grads: dict[int, tuple[Group, list[Tensor]]] = {}
    for name, group in cuts.partial.items():
        grad = model.get_parameter(name).grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            grads.setdefault(id(group), (group, []))[1].append(local.flatten())
    for group, parts in grads.values():
        group.sum(torch.cat(parts))
    return {group.size: sum(len(part) for part in parts) for group, parts in grads.values()}
