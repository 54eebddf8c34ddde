"""Requests for the embedded engine, and their answers by the obvious loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from builders.reference_attention import ReferenceAttention
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.inference.sampling import DrawRow, draw
from danlu.models.decoder import Decoder, Layer
from danlu.planning.cache_memory import block_bytes

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=4)
PROMPTS = ((3, 9, 4), (7,), (3, 9, 4), (11, 12, 13, 14, 15, 16, 17))


def requests(
    options: SamplingOptions = GREEDY, count: int = 24, prompts: Sequence[Sequence[int]] = PROMPTS, **settings: Any
) -> list[Request]:
    """One for each prompt, numbered from 0."""
    return [Request(number, tuple(prompt), options, count, **settings) for number, prompt in enumerate(prompts)]


def cache_of(model: Decoder, blocks: int, block: int = 16, **settings: Any) -> EngineOptions:
    """Options with a cache of so many blocks; the host's holds a thousand, if `preempt` is by swap."""
    layers = [cast(Layer, layer).attention.cache for layer in model.layers.values()]
    size = block_bytes(layers, block, 4)
    swap = {"swap_gib": 1000 * size / 2**30, **settings}
    return EngineOptions(block=block, cache_gib=(blocks + 0.5) * size / 2**30, **swap)


def check_same(completions: Sequence[Completion], expected: Sequence[Completion], atol: float = 1e-4) -> None:
    """Equal but for the rounding of log-probabilities, which follows the size of a pass unless numerics are exact."""
    assert [discrete(completion) for completion in completions] == [discrete(completion) for completion in expected]
    for completion, reference in zip(completions, expected, strict=True):
        assert continuous(completion) == pytest.approx(continuous(reference), abs=atol)


def discrete(completion: Completion) -> tuple[Any, ...]:
    """All of a completion that is not rounded."""
    supports = [support.ids.tolist() for support in completion.support or ()]
    top = [[token for token, _ in likeliest] for likeliest in completion.top or ()]
    key = completion.number, completion.sample
    return *key, completion.tokens, completion.versions, completion.text, completion.finish, supports, top


def continuous(completion: Completion) -> list[float]:
    """All numbers of a completion that are rounded."""
    top = [logprob for likeliest in completion.top or () for _, logprob in likeliest]
    return [*completion.logprobs, *completion.drawn, *top]


def slowly(
    model: Decoder,
    request: Request,
    sample: int = 0,
    virtual_token_ids: Sequence[int] = (),
    guess: Sequence[int] = (),
    attention: Callable[[tuple[int, ...]], Any] = ReferenceAttention,
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities without a cache: the whole text goes through the model for every token.

    A guess of the answer saves passes and changes no token: a pass over the text with the guess behind it gives the
    logits of all its places, and what is drawn holds up to the first token that is not the guessed one.
    """
    begin, answer, logprobs = [*virtual_token_ids, *request.prompt], [], []
    while len(answer) < request.max_new_tokens:
        guessed = guess[len(answer) : request.max_new_tokens - 1]
        tokens, first = [*begin, *answer, *guessed], len(begin) + len(answer)
        rows = [
            DrawRow(request.sampling, request.random_number, sample, place, tokens[len(virtual_token_ids) : place])
            for place in range(first, len(tokens) + 1)
        ]
        with torch.no_grad():
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attention((0, len(tokens))))
            drawn = draw(model.logits(hidden[first - 1 :]), rows)
        certain = 1
        while certain < len(rows) and drawn.tokens[certain - 1] == guessed[certain - 1]:
            certain += 1
        answer += drawn.tokens[:certain]
        logprobs += drawn.logprobs[:certain]
    return answer, logprobs
