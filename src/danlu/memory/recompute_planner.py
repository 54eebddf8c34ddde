"""Measurements of what each layer costs in each kind of recomputation: the numbers of `memory.recompute_choice`.

Sizes and times are measured on the layers themselves, on tokens of a real micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from danlu.core.layer_types import Attend
from danlu.memory.layer_plan import KINDS, Kind
from danlu.memory.recompute import unwrap_layer, wrap_layer
from danlu.memory.recompute_choice import LayerCosts, Option
from danlu.models.decoder import Decoder, Layer

_ROUNDS = 3  # of measurement, of which the median counts


def measure_layers(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
    dtype: torch.dtype,
    *,
    recomputing: Attend | None = None,
    gathered: bool = False,
) -> list[LayerCosts]:
    """Bytes and seconds of every layer in every kind, forward and backward over a micro-batch like this one.

    Layers that are alike are measured once. The model has its weights and adapters, is not wrapped yet and is not
    sharded by layers; gradients are left alone. Times differ from process to process: where there are several, one
    makes the plan for all.

    Args:
        tokens, positions: [T] int64, with `attend` for their documents.
        dtype:    of activations.
        recomputing: attends alike, but computes probabilities again, as layers of kind `elementwise` do.
        gathered: as `recompute.wrap` has it.
    """
    rotations = model.rotations(positions, dtype)
    x = _first_input(model, tokens, dtype)
    tables = [table for rotation in rotations for table in rotation if table is not None]
    weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers(), *tables)}
    measured: dict[Any, LayerCosts] = {}
    costs = []
    for name, layer in model.layers.items():
        assert isinstance(layer, Layer)
        parameters = tuple((path, p.shape, p.dtype, p.requires_grad) for path, p in layer.named_parameters())
        key = repr(layer), parameters, x.requires_grad  # equal for layers with the same bytes and times
        if key not in measured:
            hidden = x.detach().requires_grad_(x.requires_grad)
            inputs = dict.fromkeys(KINDS, (hidden, rotations, attend))
            inputs["elementwise"] = hidden, rotations, recomputing or attend
            measured[key] = _measure_layer(layer, inputs, weights, len(tokens), gathered)
        costs.append(replace(measured[key], layer=int(name)))
        x = x.detach().requires_grad_(x.requires_grad or any(each.requires_grad for each in layer.parameters()))
    return costs


def _first_input(model: Decoder, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the input of the first layer, [T, D].

    It is embeddings, which also give prefixes the places of their tokens; on a later stage of a pipeline, numbers like
    those of hidden states, with a gradient.
    """
    if model.chunks.has_first:
        return model.embed_tokens(tokens, dtype)
    numbers = torch.arange(len(tokens) * model.config.hidden_size, device=tokens.device)
    return numbers.sin().to(dtype).view(len(tokens), -1).requires_grad_()


def _measure_layer(
    layer: Layer, inputs: Mapping[Kind, tuple[Any, ...]], weights: set[int], tokens: int, gathered: bool
) -> LayerCosts:
    """The costs of a layer in every kind. weights: addresses of storages that are no activations."""
    times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    kept: dict[Kind, int] = {}
    for round_number in range(1 + _ROUNDS):  # the first warms up
        for kind in KINDS:  # side by side, so that whatever else the machine does slows all of them
            wrap_layer(layer, kind, gathered=gathered)
            try:
                kept[kind], seconds = _run_once(layer, inputs[kind], weights)
            finally:
                unwrap_layer(layer)
            if round_number:
                times[kind].append(seconds)
    median = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    options = tuple(Option(kind, kept[kind], max(0.0, median[kind] - median["none"])) for kind in KINDS)
    x = inputs["none"][0]
    # With sequence parallelism all tokens are gathered again, at one entrance after the other.
    gathered_again = tokens * x.shape[1] * x.element_size() if gathered else 0
    return LayerCosts(0, kept["none"] + gathered_again, options)


def _run_once(layer: Layer, inputs: tuple[Any, ...], weights: set[int]) -> tuple[int, float]:
    """Bytes that autograd keeps, and seconds of one forward and one backward pass."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    x = inputs[0]
    wanted = [each for each in (x, *layer.parameters()) if each.requires_grad]
    _synchronize(x.device)
    start = time.perf_counter()
    with saved_tensors_hooks(count, lambda tensor: tensor):
        y = layer(*inputs)
    if wanted:
        torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
    _synchronize(x.device)
    return sum(kept.values()), time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
