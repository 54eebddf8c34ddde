"""Which layers make what again for the least time under a budget of bytes: a knapsack over layers, solved exactly.

Backward goes from the last layer to the first, and what a layer kept is gone when it is done. So while layer l is in
its backward pass there is at most what the layers before it keep and all that layer l makes: at no l may that be more
than the budget. Sizes and times are measured on the layers themselves, on tokens of a real micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from danlu.errors import RecipeError
from danlu.memory.recompute import KINDS, Kind, LayerPlan, unwrap_layer, wrap_layer
from danlu.models.decoder import Decoder, Layer
from danlu.models.rope import rotary_tables
from danlu.types import Attend

_ROUNDS = 3
_FRONTIER = 4096
"""Partial plans that are followed at a time. Layers of one kind make far fewer; past it the fastest of each 4096th part
of the budget is kept, so a plan always fits, and is the best but for that grain."""


@dataclass(frozen=True)
class Option:
    """One way to run a layer."""

    kind: Kind
    kept_bytes: int  # between forward and backward
    time_s: float  # more than without recomputation, for forward and backward of a micro-batch


@dataclass(frozen=True)
class LayerCosts:
    layer: int
    whole_bytes: int  # all that the layer makes for its backward pass
    options: tuple[Option, ...]


@dataclass(frozen=True)
class _Partial:
    """What is chosen for the first layers."""

    kept_bytes: int
    time_s: float
    last: Option | None = None
    before: _Partial | None = None


def fastest_plan(costs: Sequence[LayerCosts], budget_bytes: int) -> list[LayerPlan]:
    """The plan that takes least time, of those that never hold more than `budget_bytes`.

    Raises RecipeError when no plan does, with the least that any needs.
    """
    frontier = [_Partial(0, 0.0)]
    for one in costs:
        grown = [
            _Partial(partial.kept_bytes + option.kept_bytes, partial.time_s + option.time_s, option, partial)
            for partial in frontier
            if partial.kept_bytes + one.whole_bytes <= budget_bytes
            for option in one.options
        ]
        frontier = _best(grown, budget_bytes)
        if not frontier:
            raise RecipeError(
                f"memory.recompute.budget: {_gib(budget_bytes)} GiB is less than the activations of a micro-batch need "
                f"however much is recomputed: {_gib(least_peak_bytes(costs))} GiB. Raise it, or lower batch.micro or "
                "data.max_length"
            )
    kinds: list[Kind] = []
    partial: _Partial | None = min(frontier, key=lambda one: one.time_s)
    while partial is not None and partial.last is not None:
        kinds.append(partial.last.kind)
        partial = partial.before
    return [LayerPlan(one.layer, kind) for one, kind in zip(costs, reversed(kinds), strict=True)]


def _best(partials: list[_Partial], budget_bytes: int) -> list[_Partial]:
    """Those that no other beats in both bytes and time, by rising bytes."""
    best: list[_Partial] = []
    for one in sorted(partials, key=lambda one: (one.kept_bytes, one.time_s)):
        if not best or one.time_s < best[-1].time_s:
            best.append(one)
    if len(best) <= _FRONTIER:
        return best
    by_grain = {one.kept_bytes * _FRONTIER // max(1, budget_bytes): one for one in best}  # the last is the fastest
    return [best[0], *(one for one in by_grain.values() if one is not best[0])]


def least_peak_bytes(costs: Sequence[LayerCosts]) -> int:
    """The smallest budget for which there is a plan: each layer keeps as little as it can."""
    kept = most = 0
    for one in costs:
        most = max(most, kept + one.whole_bytes)
        kept += min(option.kept_bytes for option in one.options)
    return most


def peak_bytes(costs: Sequence[LayerCosts], plan: Sequence[LayerPlan]) -> int:
    """The most that a plan holds at a time."""
    kept = most = 0
    for one, chosen in zip(costs, plan, strict=True):
        most = max(most, kept + one.whole_bytes)
        kept += next(option.kept_bytes for option in one.options if option.kind == chosen.kind)
    return most


def measure_layers(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
    dtype: torch.dtype,
    *,
    gathered: bool = False,
) -> list[LayerCosts]:
    """Bytes and seconds of every layer in every kind, forward and backward over a micro-batch like this one.

    gathered: as `recompute.wrap` has it.
    Layers that are alike are measured once. The model has its weights and adapters, is not wrapped yet and is not
    sharded by layers; gradients are left alone. Times differ from process to process: where there are several, one
    makes the plan for all.
    """
    cos, sin = (table.to(dtype) for table in rotary_tables(model.config, positions))
    x = model.embed_tokens(tokens, dtype)  # also tells prefixes where their tokens are
    held = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), cos, sin)}
    known: dict[Any, LayerCosts] = {}
    costs = []
    for name, layer in model.layers.items():
        assert isinstance(layer, Layer)
        likeness = _likeness(layer, x.requires_grad)
        if likeness not in known:
            inputs = x.detach().requires_grad_(x.requires_grad), cos, sin, attend
            known[likeness] = _measured(layer, inputs, held, gathered)
        found = known[likeness]
        costs.append(LayerCosts(int(name), found.whole_bytes, found.options))
        x = x.detach().requires_grad_(x.requires_grad or any(one.requires_grad for one in layer.parameters()))
    return costs


def _likeness(layer: Layer, from_below: bool) -> Any:
    """The same for layers whose bytes and times are the same."""
    parameters = tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in layer.named_parameters())
    return repr(layer), parameters, from_below


def _measured(layer: Layer, inputs: tuple[Any, ...], held: set[int], gathered: bool) -> LayerCosts:
    times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    kept: dict[Kind, int] = {}
    for measured in range(1 + _ROUNDS):  # the first warms up
        for kind in KINDS:  # side by side, so that whatever else the machine does slows all of them
            wrap_layer(layer, kind, gathered=gathered)
            try:
                kept[kind], seconds = _once(layer, inputs, held)
            finally:
                unwrap_layer(layer)
            if measured:
                times[kind].append(seconds)
    median = {kind: statistics.median(found) for kind, found in times.items()}
    options = tuple(Option(kind, kept[kind], max(0.0, median[kind] - median["none"])) for kind in KINDS)
    x, cos = inputs[:2]
    again = len(cos) * x.shape[1] * x.element_size() if gathered else 0  # all tokens, at one entrance after the other
    return LayerCosts(0, kept["none"] + again, options)


def _once(layer: Layer, inputs: tuple[Any, ...], held: set[int]) -> tuple[int, float]:
    """Bytes kept, and seconds of one forward and one backward pass."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    x = inputs[0]
    wanted = [one for one in (x, *layer.parameters()) if one.requires_grad]
    _wait(x.device)
    start = time.perf_counter()
    with saved_tensors_hooks(count, lambda tensor: tensor):
        y = layer(*inputs)
    if wanted:
        torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
    _wait(x.device)
    return sum(kept.values()), time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g}"
