"""The rollout engine over a model that was loaded for generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from danlu.rollout.cache_size import cache_gib
from danlu.rollout.embedded import EmbeddedEngine
from danlu.rollout.engine import EngineOptions
from danlu.rollout.load_model import LoadedModel
from danlu.rollout.request import Request


def engine_of(loaded: LoadedModel, options: EngineOptions | None = None) -> EmbeddedEngine:
    """An engine that answers with the model, switches between its adapters, and decodes with its tokenizer.

    Raises ResourceError where the options leave no room for a cache.
    """
    return EmbeddedEngine(
        loaded.model,
        options,
        dtype=loaded.dtype,
        decode=loaded.chat_tokenizer.decode,
        adapters=loaded.engine_adapters,
    )


def with_room_for(loaded: LoadedModel, requests: Sequence[Request], options: EngineOptions) -> EngineOptions:
    """The options with a cache that holds the longest of the requests, and is no smaller than it was."""
    adapters = loaded.engine_adapters

    def tokens(request: Request) -> int:
        virtual = () if adapters is None else adapters.virtual_token_ids(request.adapter)
        return len(virtual) + len(request.prompt) + request.max_new_tokens

    longest = max(map(tokens, requests), default=0)
    return replace(options, cache_gib=max(options.cache_gib, cache_gib(loaded.model, loaded.dtype, [longest], options)))
