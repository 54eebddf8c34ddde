"""Answers of the embedded engine to prompts that are asked alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.decoder import Decoder


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    *,
    options: EngineOptions | None = None,
    top_logprobs: int = 0,
    **engine: Any,
) -> list[Completion]:
    """One answer to each prompt, in order, by an engine of its own. engine: further arguments of `EmbeddedEngine`."""
    requests = [
        Request(
            number, tuple(prompt), sampling, max_new_tokens, stop_ids=frozenset(stop_ids), top_logprobs=top_logprobs
        )
        for number, prompt in enumerate(prompts)
    ]
    return EmbeddedEngine(model, options, **engine).generate(requests)
