"""The sizes of a model's cache as it lies on the processes, and the cache that some texts need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from danlu.core.layer_types import LayerCache
from danlu.inference.engine import EngineOptions
from danlu.models.decoder import Decoder, Layer
from danlu.parallel.pipeline import Pipeline
from danlu.planning.cache_memory import GIB, CacheSizes, needed_cache_bytes


def cache_sizes(
    model: Decoder, options: EngineOptions, dtype: torch.dtype, pipeline: Pipeline | None = None
) -> CacheSizes:
    """The sizes of a model's cache; in a pipeline the largest of any stage, which has its own layers alone, so that all
    stages have the same number of blocks.

    dtype: of activations. All stages of a pipeline call it.
    """
    routes = model.config.route_shape if options.routes else None
    drafts = options.bounds.drafts
    own = CacheSizes.of(layer_caches(model), options.block, dtype.itemsize, routes, options.cache, drafts)
    return own if pipeline is None else CacheSizes.largest(pipeline.all_gather(own))


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
    sizes = cache_sizes(model, options, dtype, pipeline)
    return needed_cache_bytes(sizes, options.bounds, lengths, model.config.context_length) / GIB
