"""What a step of a recipe really sends, and what the formulas say it would: both for one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from danlu.data.batch import NOTHING, fill_up
from danlu.parallel.sent import Sent
from danlu.parallel.traffic import Traffic
from danlu.plan.traffic import Cut, Weight, data_sent, tensor_sent
from danlu.recipe.sections import Bottleneck
from danlu.types import Pack
from danlu.verify.observing import Learning


@dataclass(frozen=True)
class Sending:
    """What one process sends in a step."""

    counted: list[Sent]
    formula: list[Sent]


def sent_in_a_step(learning: Learning, packs: Sequence[Pack]) -> Sending:
    """Counted in one step, after one that is not: DDP sends the order of its buckets once.

    Only forward and backward passes and the sums behind them: numbers may mean nothing (on pretended processes).
    """
    _forward_and_backward(learning, packs)
    with Traffic(learning.ranks.layout) as traffic:
        _forward_and_backward(learning, packs)
    return Sending(traffic.sent(), _by_formula(learning, packs))


def _forward_and_backward(learning: Learning, packs: Sequence[Pack]) -> None:
    compute = learning.compute
    spread = compute.spread
    groups = list(_groups(learning, packs))
    for number, group in enumerate(groups, 1):
        batch = compute.collate([pack for _, pack in group])
        compute.noise(1, group)
        with spread.begin(number == len(groups)):
            compute.losses(batch, compute.loss, 1.0).total.backward()
        compute.noise(None)
    spread.finish()
    for _, parameter in learning.placed.parameters():
        parameter.grad = None


def _groups(learning: Learning, packs: Sequence[Pack]) -> Iterator[list[tuple[int, Pack]]]:
    spread, micro = learning.compute.spread, learning.compute.micro
    own = [(number, packs[number]) for number in spread.own(packs)]
    for number in range(spread.rounds(len(packs), micro)):
        yield own[number * micro : (number + 1) * micro]


def _by_formula(learning: Learning, packs: Sequence[Pack]) -> list[Sent]:
    """What `plan.traffic` says of the same step on the same process."""
    section, layout = learning.recipe.parallel, learning.ranks.layout
    groups = list(_groups(learning, packs))
    found = list(data_sent(_weights(learning), layout, section, micro_batches=len(groups)))
    if layout.tensor > 1:
        found += tensor_sent(_cut(learning, groups), layout, section)
    return found


def _weights(learning: Learning) -> list[Weight]:
    """The parameters of a placed model as the formulas see them."""
    compute = learning.compute
    # The root's own are gathered once a micro-batch: the backward pass begins with them.
    narrow = compute.dtype if compute.adapters is None else torch.float32
    return [
        Weight(
            tuple(parameter.shape),
            trained=parameter.requires_grad,
            sharded=isinstance(parameter, DTensor),
            gathered_bytes=narrow.itemsize if parameter.is_floating_point() else parameter.element_size(),
            gathers=2 if name.startswith("layers.") else 1,
        )
        for name, parameter in compute.model.named_parameters()
    ]


def _cut(learning: Learning, groups: Sequence[Sequence[tuple[int, Pack]]]) -> Cut:
    compute, config = learning.compute, learning.compute.model.config
    tokens = targets = 0
    for group in groups:
        batch = compute.collate([pack for _, pack in group] or [NOTHING])
        batch = fill_up(batch, compute.multiple)
        tokens += len(batch.tokens)
        targets += len(batch.targets)
    partial: Counter[int] = Counter()
    for across, name in compute.spread.sums:
        parameter = compute.spread.held[name].local
        if parameter.requires_grad and set(across.ranks) <= set(learning.ranks.tensor.ranks):
            partial[across.size] += parameter.numel()
    again = learning.recipe.memory.recompute.kind in ("full", "every")
    return Cut(
        tokens=tokens,
        targets=targets,
        hidden_size=config.hidden_size,
        layers=config.layers,
        activation_bytes=compute.dtype.itemsize,
        partial=partial,
        remade=config.layers if again else 0,
        unneeded=_halves_without_gradient(learning, config.layers),
        remade_to_the_end=config.sandwich_norms or isinstance(learning.recipe.adapter, Bottleneck),
    )


def _halves_without_gradient(learning: Learning, layers: int) -> int:
    """`plan.traffic.Cut.unneeded`."""
    trained = [name for name, one in learning.compute.model.named_parameters() if one.requires_grad]
    if any(not name.startswith("layers.") and not name.startswith(("norm", "lm_head")) for name in trained):
        return 0  # the embedding is trained, or something on it
    halves = [f"layers.{layer}.{half}." for layer in range(layers) for half in ("attention", "mlp")]
    norms = {half: half.removesuffix(".") + "_norm." for half in halves}
    for number, half in enumerate(halves):
        if any(name.startswith(norms[half]) for name in trained):
            return number
        if any(name.startswith(half) for name in trained):
            return number + 1
    return len(halves)
