"""Presence and frequency penalties against counting by hand, in single draws and in answers of the engine."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from builders.reference_attention import ReferenceAttention
from builders.rollout_requests import cache_of

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.penalties import GeneratedTokens, SeenTokens, TokenCounts
from danlu.inference.request import Request, SamplingOptions
from danlu.inference.sampling import DrawRow, draw

V = 61
BOTH = SamplingOptions(presence_penalty=0.7, frequency_penalty=0.9, seed=3)
OPTIONS = [
    BOTH,
    SamplingOptions(presence_penalty=-1.5),
    SamplingOptions(frequency_penalty=2.0, temperature=0.6),
    SamplingOptions(frequency_penalty=-0.3, presence_penalty=2.0, temperature=0),
    SamplingOptions(presence_penalty=1.0, repetition_penalty=1.4, top_p=0.9),
    SamplingOptions(frequency_penalty=1.0, top_k=7, allowed_ids=tuple(range(0, V, 2))),
]


def counts_of(tokens: list[int]) -> TokenCounts:
    generated = GeneratedTokens()
    for token in tokens:
        generated.add(token)
    return generated.counts


def penalised(logits: torch.Tensor, options: SamplingOptions, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[V] float64: one token after the other, as OpenAI and CTRL write it."""
    altered = logits.double()
    for token in {*prompt, *answer}:
        factor = options.repetition_penalty
        altered[token] = altered[token] * factor if altered[token] < 0 else altered[token] / factor
    for token, count in Counter(answer).items():
        altered[token] -= count * options.frequency_penalty + options.presence_penalty
    return altered


def unpenalised(options: SamplingOptions) -> SamplingOptions:
    return dataclasses.replace(options, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)


def test_tokens_are_counted_as_they_come():
    generated = GeneratedTokens()
    for token in (7, 2, 7):
        generated.add(token)
    before = generated.counts
    generated.add(2)
    assert dict(zip(*map(np.ndarray.tolist, before), strict=True)) == {7: 2, 2: 1}, "a copy"
    assert dict(zip(*map(np.ndarray.tolist, generated.counts), strict=True)) == {7: 2, 2: 2}
    more = before.plus([9, 2, 9])
    assert dict(zip(*map(np.ndarray.tolist, more), strict=True)) == {7: 2, 2: 2, 9: 2}
    assert all(column.dtype == np.int64 for column in more)


def test_seen_tokens_are_distinct_and_grow():
    seen = SeenTokens([4, 4, 2])
    for token in (7, 2, 7):
        seen.add(token)
    assert sorted(seen.ids.tolist()) == [2, 4, 7] and seen.ids.dtype == np.int64
    before = seen.ids
    seen.add(9)
    assert len(before) == 3 and len(seen.ids) == 4


@pytest.mark.parametrize("slice_rows", [None, 16])
def test_draws_are_those_of_logits_with_the_amounts_taken_off(slice_rows):
    """Rows of all options, and one without penalties, in one batch; `logprobs` are the model's all the same."""
    options = [*OPTIONS, SamplingOptions()]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(options), V, generator=generator) * 2
    draws = np.random.default_rng(0)
    texts = [(draws.integers(0, 9, 4).tolist(), draws.integers(0, 12, 30).tolist()) for _ in options]
    rows = [
        DrawRow(each, number, 0, 34, np.array([*prompt, *answer]), generated=counts_of(answer))
        for number, (each, (prompt, answer)) in enumerate(zip(options, texts, strict=True))
    ]
    drawn = draw(logits, rows, slice_rows=slice_rows)
    by_hand = torch.stack([penalised(*row) for row in zip(logits, options, *zip(*texts, strict=True), strict=True)])
    plain = [dataclasses.replace(row, options=unpenalised(row.options), seen=None, generated=None) for row in rows]
    expected = draw(by_hand.float(), plain, slice_rows=slice_rows)
    assert drawn.tokens == expected.tokens and drawn.drawn == pytest.approx(expected.drawn, abs=1e-5)
    supports = [[None if each is None else each.ids.tolist() for each in one.supports] for one in (drawn, expected)]
    assert supports[0] == supports[1]
    of_model = draw(logits, plain, slice_rows=slice_rows)
    scaled = logits / torch.tensor([[each.temperature or 1.0] for each in options])
    index = torch.tensor(drawn.tokens)[:, None]
    assert drawn.logprobs == pytest.approx(scaled.log_softmax(-1).gather(1, index)[:, 0].tolist(), abs=1e-5)
    assert drawn.drawn[:-1] != pytest.approx(of_model.drawn[:-1], abs=1e-2)  # control: they make a difference
    assert drawn.drawn[-1] == of_model.drawn[-1]


def by_hand(model, request, sample=0, *, counts_prompt=False):
    """The answer without a cache, counting by hand; with `counts_prompt` the prompt's tokens too, which is wrong."""
    tokens, options = list(request.prompt), request.sampling
    for _ in range(request.max_new_tokens):
        answer = tokens if counts_prompt else tokens[len(request.prompt) :]
        with torch.no_grad():
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), ReferenceAttention((0, len(tokens))))
            logits = penalised(model.logits(hidden[-1:])[0], options, tokens, answer).float()
        row = DrawRow(unpenalised(options), request.random_number, sample, len(tokens))
        tokens += draw(logits[None], [row]).tokens
    return tokens[len(request.prompt) :]


REQUESTS = [
    Request(number, ((5, 9, 5, 3), (7,))[number % 2], options, 16, samples=1 + number % 2)
    for number, options in enumerate(OPTIONS)
]


def test_answers_are_those_of_counting_by_hand(small_decoder):
    """In a cache that is too small for all at once, so that some are preempted and read again."""
    model = small_decoder()
    expected = [by_hand(model, request, sample) for request in REQUESTS for sample in range(request.samples)]
    engine = EmbeddedEngine(model, cache_of(model, 6, block=4))
    assert [completion.tokens for completion in engine.generate(REQUESTS)] == expected
    assert engine.statistics.preemptions > 0
    assert by_hand(model, REQUESTS[0], counts_prompt=True) != expected[0]  # control: the prompt's tokens do not count
    free = [dataclasses.replace(request, sampling=unpenalised(request.sampling)) for request in REQUESTS]
    assert all(
        completion.tokens != answer
        for completion, answer in zip(EmbeddedEngine(model).generate(free), expected, strict=True)
    )


def test_drafts_change_nothing(small_decoder):
    """Tokens behind proposals count these too."""
    model = small_decoder()
    expected = EmbeddedEngine(model).generate(REQUESTS)
    engine = EmbeddedEngine(model, EngineOptions(draft=DraftOptions("ngram", 3)))
    assert [one.tokens for one in engine.generate(REQUESTS)] == [one.tokens for one in expected]
    assert engine.statistics.drafts_accepted > 0


def test_an_answer_goes_on_with_its_counts(small_decoder):
    model, request = small_decoder(), Request(0, (5, 9, 5), BOTH, 20)
    (whole,) = EmbeddedEngine(model).generate([request])
    first = EmbeddedEngine(model)
    first.submit(request)
    for _ in range(9):
        first.step()
    second = EmbeddedEngine(model)
    second.restore(json.loads(json.dumps(first.state())))
    completions = []
    while second.unfinished:
        completions += second.step()
    assert [one.tokens for one in completions] == [whole.tokens]
