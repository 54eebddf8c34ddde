"""The rollout engine over a model that was loaded for generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from danlu.assembly.frozen_base import adapters_of
from danlu.inference.cache_size import cache_gib
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.engine_adapters import EngineAdapters, LoadableAdapters
from danlu.inference.grammar import Grammars
from danlu.inference.load_model import LoadedModel, load_model
from danlu.inference.request import Request
from danlu.inference.resolve_model import resolve_model


def engine_of(
    loaded: LoadedModel, options: EngineOptions | None = None, adapters: EngineAdapters | None = None
) -> EmbeddedEngine:
    """An engine that answers with the model, switches between its adapters, and decodes with its tokenizer.

    adapters: in place of the model's.

    A draft model that the options name is loaded too.
    Raises ResourceError where the options leave no room for a cache, ModelError for a draft model that is none.
    """
    options, draft = options or EngineOptions(), None
    if options.draft is not None and options.draft.model is not None:
        resolved = resolve_model(options.draft.model)
        device = loaded.model.embed_tokens.weight.device.type
        draft = load_model(resolved, loaded.chat_tokenizer, device=device, merged=True).model
    return EmbeddedEngine(
        loaded.model,
        options,
        dtype=loaded.dtype,
        decode=loaded.chat_tokenizer.decode,
        adapters=loaded.engine_adapters if adapters is None else adapters,
        draft_model=draft,
        grammars=Grammars(loaded.chat_tokenizer.tokenizer, loaded.model.config.vocab_size, loaded.stop_ids),
    )


def loadable_adapters(loaded: LoadedModel) -> LoadableAdapters:
    """The adapters of a model, to which others may come while its engine runs."""
    if loaded.stacks is not None:
        names = dict(zip(loaded.adapter_names, loaded.stacks.names, strict=True))
        return LoadableAdapters(loaded.stacks.adapters, names)
    return LoadableAdapters(adapters_of(loaded.model, device=loaded.model.embed_tokens.weight.device), {})


def with_room_for(loaded: LoadedModel, requests: Sequence[Request], options: EngineOptions) -> EngineOptions:
    """The options with a cache that holds the longest of the requests, and is no smaller than it was."""
    adapters = loaded.engine_adapters

    def tokens(request: Request) -> int:
        virtual = () if adapters is None else adapters.virtual_token_ids(request.adapter)
        return len(virtual) + len(request.prompt) + request.max_new_tokens

    longest = max(map(tokens, requests), default=0)
    return replace(options, cache_gib=max(options.cache_gib, cache_gib(loaded.model, loaded.dtype, [longest], options)))
