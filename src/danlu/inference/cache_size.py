"""The memory that keys and values of sequences take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch

from danlu.core.layer_types import LayerCache
from danlu.inference.engine import EngineOptions
from danlu.inference.pool import CachePool
from danlu.inference.state_pool import StatePool
from danlu.models.decoder import Decoder, Layer
from danlu.models.router_replay import route_shape
from danlu.parallel.pipeline import Pipeline

GIB = 2**30


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of a model's cache; in a pipeline the largest of any stage, which has its own layers alone, so that all
    stages have the same number of blocks."""

    block_bytes: int
    """Bytes of a block, over all layers."""
    state_bytes: int
    """Bytes of a sequence's states."""
    window: int | None
    """The largest of all layers' attention windows, in tokens; None where a layer sees everything."""

    @classmethod
    def of(
        cls, model: Decoder, options: EngineOptions, dtype: torch.dtype, pipeline: Pipeline | None = None
    ) -> CacheSizes:
        """Computes the sizes of a model's cache.

        dtype: of activations. All stages of a pipeline call it.
        """
        layers = layer_caches(model)
        routes = route_shape(model.config) if options.routes else None
        own = (
            CachePool.block_bytes(layers, options.block, dtype, routes),
            StatePool.slot_bytes(layers, dtype),
            [layer.window for layer in layers if layer.shapes],
        )
        of_stages = [own] if pipeline is None else pipeline.all_gather(own)
        windows = [window for _, _, several in of_stages for window in several]
        return cls(
            max(block_bytes for block_bytes, _, _ in of_stages),
            max(state_bytes for _, state_bytes, _ in of_stages),
            None if None in windows else max((window for window in windows if window is not None), default=1),
        )


def layer_caches(model: Decoder) -> list[LayerCache]:
    """The cache layout of each layer of a decoder, by its number; empty for layers of another stage."""
    elsewhere = LayerCache((), None)
    own = {int(name): cast(Layer, layer).attention.cache for name, layer in model.layers.items()}
    return [own.get(number, elsewhere) for number in range(len(model.config.layers))]


def cache_gib(
    model: Decoder,
    dtype: torch.dtype,
    lengths: Iterable[int],
    options: EngineOptions,
    pipeline: Pipeline | None = None,
) -> float:
    """The size of the cache in GiB for sequences of these lengths in tokens, virtual ones included, all present at
    once.

    A sequence is never longer than the model's context. dtype: of activations. All stages of a pipeline call it.
    """
    sizes = CacheSizes.of(model, options, dtype, pipeline)
    context = model.config.context_length
    lengths = list(lengths)
    blocks = sum(-(-min(length, context) // options.block) for length in lengths)
    state_bytes = min(len(lengths), options.sequences) * sizes.state_bytes
    # States may take half of the cache: see `ModelRunner.running_limit`.
    return max(2 * state_bytes, state_bytes + blocks * sizes.block_bytes) / GIB
