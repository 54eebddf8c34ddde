"""How much memory the keys and values of some sequences take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from danlu.models.decoder import Decoder, Layer
from danlu.models.router_replay import route_shape
from danlu.rollout.engine import EngineOptions
from danlu.rollout.pool import CachePool
from danlu.rollout.state_pool import StatePool

GIB = 2**30


def cache_gib(model: Decoder, dtype: torch.dtype, lengths: Iterable[int], options: EngineOptions) -> float:
    """What the cache takes where sequences of so many tokens, virtual ones among them, are in it at once, in GiB.

    A sequence is never longer than the model's context. dtype: of activations.
    """
    layers = [cast(Layer, layer).attention.cache for layer in model.layers.values()]
    context = model.config.context_length
    lengths = list(lengths)
    blocks = sum(-(-min(length, context) // options.block) for length in lengths)
    state_bytes = min(len(lengths), options.sequences) * StatePool.slot_bytes(layers, dtype)
    block_bytes = CachePool.block_bytes(layers, options.block, dtype, route_shape(model) if options.routes else None)
    # States may take half of the cache: see `ModelRunner.running_limit`.
    return max(2 * state_bytes, state_bytes + blocks * block_bytes) / GIB
