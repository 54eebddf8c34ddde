"""What a step of a recipe really sends, and what the formulas say it would: both for one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from danlu.adapters.adapter import Adapter
from danlu.adapters.lora import LowRank
from danlu.adapters.mora import Mora
from danlu.adapters.slot import Slot
from danlu.data.batch import EMPTY_PACK, pad_to_bucket
from danlu.language.learner import DecoderLearner
from danlu.language.placed import PlacedDecoder
from danlu.memory.recompute import Plan
from danlu.models.decoder import Decoder, Layer
from danlu.models.modules import Linear
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.tensor import LINEAR_AXES
from danlu.parallel.traffic_counter import TrafficCounter
from danlu.plan.traffic import TensorStep, Weight, data_traffic, decoder_regions, tensor_traffic
from danlu.recipe.sections import Bottleneck
from danlu.train.step import micro_batch_ranges
from danlu.types import Item, Totals
from danlu.verify.proxy import Groups, PlacedProxy
from danlu.verify.trace import ProxyTraining


@dataclass(frozen=True)
class StepTraffic:
    """What one process sends in a step."""

    counted: list[CollectiveTraffic]
    formula: list[CollectiveTraffic]


def measure_step_traffic(learning: ProxyTraining, packs: Sequence[Item]) -> StepTraffic:
    """Counted in one step, after one that is not: DDP sends the order of its buckets once.

    Only forward and backward passes and the sums behind them: numbers may mean nothing (under `fake_process_group`).
    """
    _forward_and_backward(learning, packs)
    with TrafficCounter(learning.ranks.layout) as traffic:
        _forward_and_backward(learning, packs)
    return StepTraffic(traffic.counted(), learning.proxy.sent(learning, list(_groups(learning, packs))))


def _forward_and_backward(learning: ProxyTraining, items: Sequence[Item]) -> None:
    learner, totals = learning.learner, Totals.of(items)
    groups = list(_groups(learning, items))
    for group in groups:
        batch = learner.collate([item for _, item in group])
        with learner.dropout(1, group), learner.parallel.micro_batch(group is groups[-1]):
            learner.losses(batch, totals).total.backward()
    learner.parallel.reduce_gradients()
    for _, parameter in learning.placed.parameters():
        parameter.grad = None


def _groups(learning: ProxyTraining, items: Sequence[Item]) -> Iterator[list[tuple[int, Any]]]:
    for numbers in micro_batch_ranges(items, learning.learner.parallel, learning.learner.micro):
        yield [(number, items[number]) for number in numbers]


def sent_over_data(learning: PlacedProxy, groups: Groups, *, gathered: torch.dtype) -> list[CollectiveTraffic]:
    """What data ranks send by `plan.traffic`; gathered: the type that parameters are gathered in."""
    section, layout = learning.recipe.parallel, learning.ranks.layout
    weights = [
        Weight(
            tuple(parameter.shape),
            trained=parameter.requires_grad,
            sharded=isinstance(parameter, DTensor),
            gathered_bytes=gathered.itemsize if parameter.is_floating_point() else parameter.element_size(),
            # The root's own are gathered once a micro-batch: the backward pass begins with them.
            gathers=2 if name.startswith("layers.") else 1,
        )
        for name, parameter in learning.learner.model.named_parameters()
    ]
    return list(data_traffic(weights, layout, section, micro_batches=len(groups)))


def sent_by_decoder(learning: PlacedProxy, groups: Groups) -> list[CollectiveTraffic]:
    """What `plan.traffic` says of a decoder's step."""
    placed, layout = learning.placed, learning.ranks.layout
    assert isinstance(placed, PlacedDecoder), "that of a decoder"
    narrow = placed.dtype if placed.placed.subject.adapters is None else torch.float32
    found = sent_over_data(learning, groups, gathered=narrow)
    if layout.tensor > 1:
        found += tensor_traffic(_tensor_step(learning, groups), layout, learning.recipe.parallel)
    return found


def _tensor_step(learning: PlacedProxy, groups: Groups) -> TensorStep:
    compute, placed = learning.learner, learning.placed
    assert isinstance(compute, DecoderLearner) and isinstance(placed, PlacedDecoder), "those of a decoder"
    config = compute.model.config
    tokens = targets = 0
    for group in groups:
        batch = compute.collate([pack for _, pack in group] or [EMPTY_PACK])
        batch = pad_to_bucket(batch, compute.token_multiple)
        tokens += len(batch.tokens)
        targets += len(batch.targets)
    partial: Counter[int] = Counter()
    for reduce_group, name in compute.parallel.partial_gradients:
        parameter = compute.parallel.local_parameters[name].local
        if parameter.requires_grad and set(reduce_group.ranks) <= set(learning.ranks.tensor.ranks):
            partial[reduce_group.size] += parameter.numel()
    plan = placed.placed.plan
    first_with_gradient, trained_between = _first_with_gradient(learning, config.layers)
    keeping = [half for one in plan if one.kind != "full" for half in (2 * one.layer, 2 * one.layer + 1)]
    regions = decoder_regions(
        [(one.kind, one.segment) for one in plan],
        first_with_gradient=first_with_gradient,
        trained_between=trained_between,
        gathered_again=[n for n in keeping if n >= first_with_gradient and _wants_its_input(compute.model, n)],
        to_the_end=config.sandwich_norms or isinstance(learning.recipe.adapter, Bottleneck),
    )
    return TensorStep(
        tokens=tokens,
        targets=targets,
        hidden_size=config.hidden_size,
        element_bytes=compute.dtype.itemsize,
        regions=regions,
        partial=partial,
        row_norms=len(groups) * _row_norms(compute.model, plan),
    )


def _wants_its_input(model: Decoder, half: int) -> bool:
    """Whether what is trained in the products at the entrance of a half of a layer takes their input for its gradient.

    half: attention of layer 0, its MLP, attention of layer 1, and so on.
    """
    layer = model.layers[str(half // 2)]
    assert isinstance(layer, Layer)
    sublayer: Any = list(layer.sublayers.values())[half % 2]
    entrance = [sublayer.get_submodule(name) for name, role in sublayer.tensor_roles.items() if role != "row"]
    return any(_takes_input(module, linear) for linear in entrance for module in linear.modules())


def _takes_input(module: nn.Module, linear: nn.Module) -> bool:
    """Whether this part of a linear layer does."""
    slot = linear.adapter
    if isinstance(module, LowRank) and module.dropout_p and isinstance(slot, Slot) and slot.stack()[0] is not module:
        return False  # upon another adapter it takes what dropout has left
    axes = LINEAR_AXES if isinstance(module, Linear) else module.tensor_axes if isinstance(module, Adapter) else {}
    trained = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    return any("inputs" in axes.get(name, ()) for name in trained) or (isinstance(module, Mora) and bool(trained))


def _row_norms(model: Decoder, plan: Plan) -> int:
    """`plan.traffic.TensorStep.row_norms` of a micro-batch."""
    ends = {one.segment: one.layer for one in plan}
    numbers = 0
    for one in plan:
        runs = 1 + (one.kind == "full") + (one.segment is not None and one.layer != ends[one.segment])
        for module in model.layers[str(one.layer)].modules():
            if (
                isinstance(module, LowRank)
                and module.tensor_group is not None
                and module.lora_magnitude_vector is not None
            ):
                outputs, rank = module.lora_B.shape
                numbers += runs * (rank * rank + (outputs * rank if module.exact_norm else outputs))
                numbers += outputs if module.exact_norm else 0  # in the backward pass
    return numbers


def _first_with_gradient(learning: PlacedProxy, layers: int) -> tuple[int, bool]:
    """`first_with_gradient` and `trained_between` of `plan.traffic.decoder_regions`."""
    trained = [name for name, one in learning.learner.model.named_parameters() if one.requires_grad]

    def any_in(place: str) -> bool:
        return any(name.startswith(place) for name in trained)

    if any(not name.startswith(("layers.", "norm.", "lm_head.")) for name in trained):
        return 0, False  # the embedding is trained, or something on it
    halves = [(f"layers.{layer}", half) for layer in range(layers) for half in Layer.sublayer_names]
    for number, (layer, half) in enumerate(halves):
        if any_in(f"{layer}.{half}_norm."):
            return number, True
        if any_in(f"{layer}.{half}."):
            return number + 1, False
        if any_in(f"{layer}.after_{half}.") or any_in(f"{layer}.post_{half}_norm."):
            return number + 1, True
    return len(halves), True
