"""The measured traffic of one process in a step of a recipe, and the traffic that the formulas of `planning.traffic`
predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from danlu.adapters.adapter import Adapter
from danlu.adapters.lora import LowRank
from danlu.adapters.mora import Mora
from danlu.adapters.slot import Slot
from danlu.data.batch import pad_to_bucket
from danlu.memory.layer_plan import Plan
from danlu.models.decoder import Decoder, Layer
from danlu.models.experts import Experts, MoE
from danlu.models.modules import Linear
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.comm import Group
from danlu.parallel.expert import Exchange, expert_names, mixtures_of
from danlu.parallel.tensor import LINEAR_AXES
from danlu.planning.traffic import (
    RowExchange,
    TensorStep,
    Weight,
    data_traffic,
    decoder_regions,
    expert_traffic,
    tensor_traffic,
)
from danlu.recipe import Recipe
from danlu.recipe.sections import Bottleneck
from danlu.stages.learner import DecoderLearner
from danlu.stages.placed import PlacedDecoder
from danlu.training.executor import Executor
from danlu.training.learner import StepItems
from danlu.verification.proxy import MicroBatches, ProxyTraining

COUNTED_STEP = 1
"""The step that traffic is counted in, and predicted for."""


def _forward(learner: DecoderLearner, micro_batches: MicroBatches) -> None:
    """The forward passes of micro-batches as an evaluation makes them, with the dropout and the draws of the step that
    is counted.
    """
    numbered = dict(pair for micro_batch in micro_batches for pair in micro_batch)
    items: list[Any] = [
        numbered.get(number) for number in range(max(numbered, default=-1) + 1)
    ]  # those of others are not asked
    own = [[number for number, _ in micro_batch] for micro_batch in micro_batches]
    step_items = StepItems(items, own, learner.totals([*numbered.values()]))
    learner = learner.judged_by(learner.evaluation, COUNTED_STEP)
    for actions, _ in learner.parallel.evaluation_rounds(len(micro_batches)):
        Executor(learner, step_items).run(actions)


def data_parallel_traffic(
    training: ProxyTraining,
    micro_batches: MicroBatches,
    *,
    gathered: torch.dtype,
    experts: Collection[str] = (),
) -> list[CollectiveTraffic]:
    """Predicts the traffic of data ranks by `planning.traffic`.

    gathered: the type that parameters are gathered in. experts: names of parameters that are experts'.
    """
    section, layout = training.recipe.parallel, training.ranks.layout
    chunks = len(training.learner.parallel.chunks)
    weights = [
        Weight(
            tuple(parameter.shape),
            trained=parameter.requires_grad,
            sharded=isinstance(parameter, DTensor),
            of_experts=name in experts,
            gathered_bytes=gathered.itemsize if parameter.is_floating_point() else parameter.element_size(),
            # The root's own are gathered once for each chunk and micro-batch: the backward pass begins with them.
            gathers=2 if name.startswith("layers.") else chunks,
            layer=int(name.split(".")[1]) if name.startswith("layers.") else None,
        )
        for name, parameter in training.learner.model.named_parameters()
    ]
    return list(data_traffic(weights, layout, section, micro_batches=len(micro_batches)))


def decoder_traffic(training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
    """Predicts the traffic of a decoder's data ranks and tensor ranks by `planning.traffic`."""
    learner, placed, layout = training.learner, training.placed, training.ranks.layout
    assert isinstance(learner, DecoderLearner) and isinstance(placed, PlacedDecoder), "those of a decoder"
    gathered = placed.dtype if placed.placed.subject.adapters is None else torch.float32
    model, plan = learner.model, placed.placed.plan
    traffic = data_parallel_traffic(training, micro_batches, gathered=gathered, experts=expert_names(model))
    if layout.tensor > 1:
        step = _tensor_step(training.recipe, training.ranks.tensor, learner, plan, micro_batches)
        traffic += tensor_traffic(step, layout, training.recipe.parallel)
    if layout.expert > 1:
        exchanges = _row_exchanges(learner, plan, micro_batches)
        element_bytes = placed.dtype.itemsize
        traffic += expert_traffic(exchanges, layout, hidden_size=model.config.hidden_size, element_bytes=element_bytes)
    return traffic


def _row_exchanges(learner: DecoderLearner, plan: Plan, micro_batches: MicroBatches) -> list[RowExchange]:
    """Counts the rows that this rank exchanges in each layer with experts, by a forward pass; all ranks make it."""
    rows: Counter[tuple[int, str]] = Counter()

    def count(layer: int, experts: Experts) -> None:
        exchange = experts.exchange
        assert isinstance(exchange, Exchange), "where experts are distributed"
        here = exchange.group.index
        rows[layer, "sent"] += sum(exchange.sends) - exchange.sends[here]
        rows[layer, "received"] += sum(exchange.receives) - exchange.receives[here]

    mixtures = {int(name): moe for name, layer in learner.model.layers.items() for moe in mixtures_of(layer)}
    with ExitStack() as hooks, torch.no_grad():
        for layer, moe in mixtures.items():
            handle = moe.experts.register_forward_hook(lambda experts, *_, layer=layer: count(layer, experts))
            hooks.callback(handle.remove)
        _forward(learner, micro_batches)
    learner.parallel.reshard()
    first_with_gradient, _ = first_half_with_gradient(learner.model)
    exchanges = []
    for place, (entry, gives_input) in enumerate(zip(plan, gives_inputs(plan), strict=True)):
        if entry.layer in mixtures:
            experts = mixtures[entry.layer].experts
            has_input_gradient = 2 * place + 1 >= first_with_gradient
            trained = any(parameter.requires_grad for parameter in experts.parameters())
            runs = 1 + (entry.kind == "full") + gives_input
            exchanges.append(
                RowExchange(
                    sent_rows=rows[entry.layer, "sent"],
                    received_rows=rows[entry.layer, "received"],
                    num_experts=experts.num_experts,
                    micro_batches=len(micro_batches),
                    runs=runs,
                    output_gradients=has_input_gradient or trained,
                    input_gradients=has_input_gradient,
                )
            )
    return exchanges


def _tensor_step(
    recipe: Recipe, tensor_ranks: Group, learner: DecoderLearner, plan: Plan, micro_batches: MicroBatches
) -> TensorStep:
    config = learner.model.config
    tokens = targets = 0
    for micro_batch in micro_batches:
        batch = learner.collate([item for _, item in micro_batch])
        batch = pad_to_bucket(batch, learner.token_multiple)
        tokens += len(batch.tokens)
        targets += len(batch.targets) if learner.model.chunks.has_last else 0
    partial: Counter[int] = Counter()  # numbers of gradients that tensor ranks sum, by the size of the group
    for reduce_group, name in learner.parallel.partial_gradients:
        parameter = learner.parallel.local_parameters[name].local
        if parameter.requires_grad and set(reduce_group.ranks) <= set(tensor_ranks.ranks):
            partial[reduce_group.size] += parameter.numel()
    first_with_gradient, trained_between = first_half_with_gradient(learner.model)
    # Recomputing a layer in full gathers its input anyway; elsewhere it is gathered again where a gradient takes it.
    borders = halves_with_gradients(learner.model)
    keeping = [half for place, entry in enumerate(plan) if entry.kind != "full" for half in (2 * place, 2 * place + 1)]
    regions = decoder_regions(
        [(entry.kind, entry.segment) for entry in plan],
        first_with_gradient=first_with_gradient,
        trained_between=trained_between,
        with_gradients=borders,
        gathered_again=[n for n in keeping if n in borders[0] and _needs_input(learner.model, n)],
        to_the_end=any(kind.norms != "pre" for kind in config.kinds) or isinstance(recipe.adapter, Bottleneck),
        has_embedding=learner.model.chunks.has_first,
        has_head=learner.model.chunks.has_last,
    )
    return TensorStep(
        tokens=tokens,
        targets=targets,
        hidden_size=config.hidden_size,
        element_bytes=learner.dtype.itemsize,
        regions=regions,
        partial=partial,
        row_norms=len(micro_batches) * _row_norms(learner.model, plan),
        head_norms=tokens * head_norms(learner.model, plan, first_with_gradient),
        micro_batches=len(micro_batches),
    )


def _needs_input(model: Decoder, half: int) -> bool:
    """Whether a gradient of trained parameters in the first products of a half of a layer takes their input.

    half: attention of the first layer here, its MLP, attention of the second one, and so on.
    """
    layer = list(model.layers.values())[half // 2]
    assert isinstance(layer, Layer)
    sublayer: Any = list(layer.sublayers.values())[half % 2]
    if isinstance(sublayer, MoE):  # experts themselves take rows that were picked out of it
        is_scattered = (
            sublayer.router.draws is not None and sublayer.router.spec.input_jitter > 0
        )  # its product is kept
        takers = (None if is_scattered else sublayer.router, sublayer.shared_gate)
        if any(parameter.requires_grad for taker in takers if taker is not None for parameter in taker.parameters()):
            return True
    named = ((sublayer.get_submodule(name), role) for name, role in sublayer.tensor_cut.roles.items())
    entrance = [module for module, role in named if role != "row" and isinstance(module, Linear)]
    return any(takes_input(module, linear) for linear in entrance for module in linear.modules())


def takes_input(module: nn.Module, linear: nn.Module) -> bool:
    """The same of one module of a linear layer: the layer itself, or a part of an adapter on it."""
    slot = linear.adapter
    if isinstance(module, LowRank) and module.dropout_p and isinstance(slot, Slot) and slot.stack()[0] is not module:
        return False  # upon another adapter it takes what dropout has left
    axes = LINEAR_AXES if isinstance(module, Linear) else module.tensor_axes if isinstance(module, Adapter) else {}
    trained = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    return any("inputs" in axes.get(name, ()) for name in trained) or (isinstance(module, Mora) and bool(trained))


def _row_norms(model: Decoder, plan: Plan) -> int:
    """`planning.traffic.TensorStep.row_norms` of a micro-batch."""
    numbers = 0
    for entry, gives_input in zip(plan, gives_inputs(plan), strict=True):
        runs = 1 + (entry.kind == "full") + gives_input
        for module in model.layers[str(entry.layer)].modules():
            if (
                isinstance(module, LowRank)
                and module.tensor_group is not None
                and module.lora_magnitude_vector is not None
            ):
                outputs, lora_rank = module.lora_B.shape
                numbers += runs * (lora_rank * lora_rank + (outputs * lora_rank if module.exact_norm else outputs))
                numbers += outputs if module.exact_norm else 0  # in the backward pass
    return numbers


def head_norms(model: Decoder, plan: Plan, first_with_gradient: int) -> int:
    """`planning.traffic.TensorStep.head_norms` of one token."""
    numbers = 0
    for place, (entry, gives_input) in enumerate(zip(plan, gives_inputs(plan), strict=True)):
        layer = model.layers[str(entry.layer)]
        assert isinstance(layer, Layer)
        for half, sublayer in enumerate(layer.sublayers.values(), 2 * place):
            for norm, source in sublayer.tensor_cut.norms.items():
                if getattr(sublayer, norm).shard is None:
                    continue
                trained = any(parameter.requires_grad for parameter in getattr(sublayer, source).parameters())
                has_gradient = half >= first_with_gradient or trained
                numbers += 1 + gives_input + has_gradient + (has_gradient and entry.kind != "none")
    return numbers


def gives_inputs(plan: Plan) -> list[bool]:
    """Whether each layer runs once more for the input of the next one: in a segment, all but the last."""
    last_layers = {entry.segment: entry.layer for entry in plan}
    return [entry.segment is not None and entry.layer != last_layers[entry.segment] for entry in plan]


def halves_with_gradients(model: Decoder) -> tuple[set[int], set[int]]:
    """The halves of layers here with a gradient at their entrances, and those with one at their exits.

    Both halves of a parallel layer read its input: what is trained in its attention is not in front of its MLP.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def any_in(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in trained)

    in_front = any(not name.startswith(("layers.", "norm.", "lm_head.")) for name in trained)
    entrances: set[int] = set()
    exits: set[int] = set()
    for place, layer in enumerate(model.chunks.local_layers):
        in_front |= model.chunks.of_layer(layer) > 0  # what comes from another stage always has a gradient
        spec, of_layer = model.config.layers[layer], in_front
        for number, half in enumerate(Layer.sublayer_names, 2 * place):
            name, norm = f"layers.{layer}", "attention" if spec.norms == "shared" else half
            enters = (of_layer if spec.parallel else in_front) or any_in(f"{name}.{norm}_norm.")
            leaves = enters or any_in(f"{name}.{half}.")
            entrances |= {number} if enters else set()
            exits |= {number} if leaves else set()
            in_front |= leaves or any_in(f"{name}.after_{half}.") or any_in(f"{name}.post_{half}_norm.")
    return entrances, exits


def first_half_with_gradient(model: Decoder) -> tuple[int, bool]:
    """`first_with_gradient` and `trained_between` of `planning.traffic.decoder_regions`, of the layers here."""
    chunks = model.chunks
    if not chunks.has_first:
        return 0, False  # what comes from another stage always has a gradient
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def any_in(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in trained)

    if any(not name.startswith(("layers.", "norm.", "lm_head.")) for name in trained):
        return 0, False  # the embedding is trained, or something on it
    halves = [(f"layers.{layer}", half) for layer in chunks.layers[0] for half in Layer.sublayer_names]
    for number, (layer, half) in enumerate(halves):
        if any_in(f"{layer}.{half}_norm."):
            return number, True
        if any_in(f"{layer}.{half}."):
            return number + 1, False
        if any_in(f"{layer}.after_{half}.") or any_in(f"{layer}.post_{half}_norm."):
            return number + 1, True
    return len(halves), True
