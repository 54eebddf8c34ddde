"""The memory that a rollout engine takes while it answers, in addition to the model. Imports no torch.

An engine within the trainer sleeps while that trains: its memory and that of activations are never taken together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from danlu.models.config import ModelConfig
from danlu.models.layer_operations import layer_operations
from danlu.parallel.layout import Layout
from danlu.planning.cache_memory import (
    DECODE_BUFFER_BYTES,
    DECODE_ROOM,
    GIB,
    CacheSizes,
    EngineBounds,
    PoolSize,
    RolloutPrecision,
    block_bytes,
)
from danlu.planning.layer_training import layers_training
from danlu.planning.rank_memory import RankStates
from danlu.planning.rollout_lengths import AskedPrompt, RolloutLengths, draws_answers
from danlu.planning.rollout_passes import PassRun, RolloutPasses
from danlu.planning.rollout_seconds import EngineModel, Precision
from danlu.planning.step_plan import HostBytes, RankMemory
from danlu.planning.workload import Workload

_FLOAT32 = 4
_LOGITS = 3
"""Tensors of the size of the logits that a draw has at a time."""


@dataclass(frozen=True)
class EngineBytes:
    """The memory of an engine while it answers, at its largest."""

    cache: int
    """Bytes of the cache of keys, values and states."""
    copies: int
    """Bytes of weights in another order or type, for the products of a rollout."""
    buffers: int
    """Bytes of keys and values that lie next to each other from pass to pass, at most."""
    activations: int
    logits: int


def engine_bytes(
    model: EngineModel,
    bounds: EngineBounds,
    prompts: Iterable[AskedPrompt],
    *,
    shares: int = 1,
    packed_gib: float = 0.0,
    is_cast: bool = False,
    precision: RolloutPrecision = "auto",
) -> EngineBytes:
    """Counts the memory of an engine that answers some prompts, all asked at the same time.

    shares: data ranks that share the prompts; each has a cache for all of them. packed_gib: the most memory of copies
    that only have another order. is_cast: whether the weights have another type than activations. precision: of the
    products of linear layers. Raises ResourceError for a cache that does not hold one block.
    """
    config, asked = model.config, list(prompts)
    pool, sizes = pool_for(model, bounds, asked)
    runs = [*RolloutPasses(asked[::shares], bounds, pool, config.has_states).runs()]
    encoded = 0 if precision == "auto" else encoded_elements(config)
    weights = model.element_bytes * (copied_elements(config) - encoded) // model.ranks
    copies = weights if is_cast and not model.training.quantized else 0
    if not is_cast and model.packs:
        copies = min(weights, int(packed_gib * GIB))
    # A CPU keeps what it multiplies in float32: codes without integer products, numbers of FP8.
    copies += encoded * (_FLOAT32 if model.device == "cpu" else 1) // model.ranks
    widest = max(_widest(config), default=0)
    tokens = max((run.tokens for run in runs), default=0)
    draws = max((run.draws for run in runs), default=0)
    return EngineBytes(
        pool.bytes_of(sizes),
        0 if model.exact else copies,
        _buffers(model, bounds, runs),
        tokens * widest * model.element_bytes // model.ranks,
        _LOGITS * _FLOAT32 * draws * config.vocab_rows,
    )


def engine_model(workload: Workload, device: Literal["cpu", "cuda"], ranks: int = 1) -> EngineModel:
    """The policy as an engine computes it. ranks: tensor ranks."""
    recipe = workload.recipe
    training = max(layers_training(recipe, workload.config), key=lambda each: len(each.adapters))
    precision: Precision = "bf16" if recipe.activations == "auto" else recipe.activations
    return EngineModel(workload.config, precision, device, training, recipe.numerics == "exact", ranks)


def pool_for(model: EngineModel, bounds: EngineBounds, prompts: Iterable[AskedPrompt]) -> tuple[PoolSize, CacheSizes]:
    """Returns the pool of an engine that answers some prompts, and the sizes of its model's cache: a run takes no more
    than they need, all present at once."""
    context = model.config.context_length
    sizes = CacheSizes.of_model(model.config, bounds, model.element_bytes, model.ranks)
    texts = [prompt.tokens + tokens for prompt in prompts for tokens in prompt.answers]
    return PoolSize.of(sizes, bounds.for_texts(sizes, texts, context), context), sizes


def copied_elements(config: ModelConfig) -> int:
    """Numbers of all weights of linear layers and of the head over the vocabulary."""
    return config.vocab_rows * config.hidden_size + _layer_elements(config, ("product",))


def encoded_elements(config: ModelConfig) -> int:
    """Numbers of the weights that `rollout.precision` encodes: those of layers, and of experts that have had a row."""
    return _layer_elements(config, ("product", "grouped"))


def _layer_elements(config: ModelConfig, kinds: Collection[str]) -> int:
    elements = 0
    for kind in config.kinds:
        products = [each for each in layer_operations(kind, config.hidden_size) if each.kind in kinds]
        of_layer = sum(math.prod(each.weights[0][1]) for each in products if not each.in_float32)
        elements += config.layers.count(kind) * of_layer
    return elements


def memory_while_answering(
    workload: Workload, states: RankStates, layout: Layout, device_type: str
) -> RankMemory | None:
    """The memory of a process at the peak of a rollout; None where none is drawn in it, or it has a stage of a
    pipeline.

    Raises ResourceError for a cache that does not hold one block.
    """
    recipe = workload.recipe
    if not draws_answers(recipe) or recipe.rollout.engine != "embedded" or recipe.rollout.staleness:
        return None
    if layout.pipeline > 1:
        return None
    model = engine_model(workload, "cpu" if device_type == "cpu" else "cuda", layout.tensor)
    lengths = workload.rollout_lengths or RolloutLengths.longest(recipe)
    shares = layout.data * layout.context
    is_cast = recipe.adapter is None and model.element_bytes < _FLOAT32
    engine = engine_bytes(
        model,
        EngineBounds.of(recipe),
        lengths.prompts,
        shares=shares,
        packed_gib=recipe.rollout.packed_gib,
        is_cast=is_cast,
        precision=recipe.rollout.precision,
    )
    return rollout_memory(states, engine)


def rollout_memory(states: RankStates, engine: EngineBytes) -> RankMemory:
    """The memory of a process at the peak of a rollout: without gradients, which a step leaves none of."""
    parts = replace(states.parts, gradients=0, gathered=0, activations=engine.activations, logits=engine.logits)
    return RankMemory(
        parts,
        states.by_role,
        kv_cache=engine.cache + engine.buffers,
        engine_copies=engine.copies,
        host=HostBytes(loading=0, step=states.offloaded, saving=0),
    )


def _widest(config: ModelConfig) -> Iterable[int]:
    """Elements of a token that each kind of layer has at a time: the stream, and what an operation reads and makes."""
    for kind in config.kinds:
        width: dict[str, int] = {"x": config.hidden_size}
        for operation in layer_operations(kind, config.hidden_size):
            width |= {value.name: value.width for value in operation.makes}
            outputs = sum(value.width for value in operation.makes if value.per == "token")
            yield 2 * config.hidden_size + outputs + sum(width.get(name, 0) for name in operation.reads)


def _buffers(model: EngineModel, bounds: EngineBounds, runs: Iterable[PassRun]) -> int:
    of_token = block_bytes([kind.mixer.cache(model.ranks) for kind in model.config.layers], 1, model.element_bytes)
    largest = 0
    for run in runs:
        tokens = -(-(run.longest + DECODE_ROOM) // bounds.block) * bounds.block
        size = run.growing * tokens * of_token
        if size <= DECODE_BUFFER_BYTES:
            largest = max(largest, size)
    return largest
