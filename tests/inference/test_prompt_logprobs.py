"""Log-probabilities of prompts against a pass over the whole text, and what must not make a difference to them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from builders.reference_attention import ReferenceAttention
from builders.rollout_requests import cache_of

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.request import Request, SamplingOptions

PROMPTS = [tuple((7 * place + number) % 61 for place in range(length)) for number, length in enumerate((1, 2, 19, 40))]
REQUESTS = [
    Request(
        number,
        prompt,
        SamplingOptions(temperature=(1.0, 0.7, 0.0, 1.0)[number], top_p=0.9, seed=1),
        6,
        samples=1 + number % 3,
        top_logprobs=3 * (number % 2),
        prompt_logprobs=True,
    )
    for number, prompt in enumerate(PROMPTS)
]


def by_hand(model, request, virtual=()):
    """[tokens - 1, V]: of each token of the prompt but the first, in one pass without a cache."""
    tokens = [*virtual, *request.prompt]
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), ReferenceAttention((0, len(tokens))))
        logits = model.logits(hidden) / (request.sampling.temperature or 1.0)
    return logits.log_softmax(-1)[len(virtual) : -1]


def check(completions, model, virtual=()):
    assert [completion.number for completion in completions] == [
        request.number for request in REQUESTS for _ in range(request.samples)
    ]
    for completion in completions:
        request = REQUESTS[completion.number]
        expected = by_hand(model, request, virtual)
        of_tokens = expected.gather(1, torch.tensor(request.prompt[1:])[:, None])[:, 0] if len(expected) else expected
        assert completion.prompt_logprobs == pytest.approx(of_tokens.flatten().tolist(), abs=1e-4)
        if not request.top_logprobs:
            assert completion.prompt_top is None
            continue
        likeliest = expected.topk(3)
        assert [[token for token, _ in top] for top in completion.prompt_top] == likeliest.indices.tolist()
        values = [value for top in completion.prompt_top for _, value in top]
        assert values == pytest.approx(likeliest.values.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "window", "softcap"])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_tokens": 7}, {"draft": DraftOptions("ngram", 3)}],
    ids=["whole", "in chunks", "with drafts"],
)
def test_they_are_those_of_one_pass_over_the_prompt(small_decoder, kind, options):
    model = small_decoder(kind)
    check(EmbeddedEngine(model, EngineOptions(**options)).generate(REQUESTS), model)


def test_a_prompt_that_is_cached_or_read_again_is_scored_all_the_same(small_decoder):
    model = small_decoder()
    engine = EmbeddedEngine(model, cache_of(model, 13, block=4))
    for _ in range(2):  # the second time the cache knows the prompts, of requests without log-probabilities
        engine.generate([dataclasses.replace(request, prompt_logprobs=False) for request in REQUESTS])
        check(engine.generate(REQUESTS), model)
    assert engine.statistics.preemptions > 0 and engine.statistics.prompt_tokens_reused > 0


def test_tokens_before_the_prompt_are_none_of_it(small_decoder):
    model = small_decoder()
    completions = EmbeddedEngine(model, virtual_token_ids=(5, 6)).generate(REQUESTS)
    check(completions, model, (5, 6))
    with pytest.raises(AssertionError):  # control
        check(completions, model)


def test_the_answers_are_the_same_without(small_decoder):
    model = small_decoder()
    plain = [dataclasses.replace(request, prompt_logprobs=False) for request in REQUESTS]
    without, beside = EmbeddedEngine(model).generate(plain), EmbeddedEngine(model).generate(REQUESTS)
    assert [one.tokens for one in without] == [one.tokens for one in beside]
    assert all(one.prompt_logprobs is None and one.prompt_top is None for one in without)


@pytest.mark.parametrize("exact", [True, False])
def test_what_was_drawn_is_scored_as_it_was_drawn(small_decoder, exact):
    """An answer as part of a prompt; to the last bit where numerics are exact.

    Otherwise in float64, whose rounding the float32 of log-probabilities does not show: how far float32 passes of other
    shapes lie apart is the CPU's affair.
    """
    model, sampling = small_decoder(), SamplingOptions(temperature=0.7, top_k=20, seed=1)
    model = model if exact else model.double()
    engine = EmbeddedEngine(model, EngineOptions(exact=exact, batch_tokens=16))
    answers = engine.generate([Request(number, prompt, sampling, 20) for number, prompt in enumerate(PROMPTS)])
    whole = [
        Request(number, (*prompt, *answer.tokens), sampling, 1, prompt_logprobs=True)
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    scored = [completion.prompt_logprobs[-20:] for completion in engine.generate(whole)]
    drawn = [answer.logprobs for answer in answers]
    if exact:
        assert scored == drawn
    else:
        for one, other in zip(scored, drawn, strict=True):
            assert one == pytest.approx(other, abs=1e-6)


def test_other_weights_score_the_whole_prompt_and_a_state_goes_on(small_decoder):
    model, other = small_decoder(), small_decoder(seed=1)
    engine = EmbeddedEngine(model, EngineOptions(batch_tokens=12))
    engine.submit(REQUESTS[3])
    engine.step()
    state = json.loads(json.dumps(engine.state()))
    assert 0 < len(state["requests"][0]["answers"][0]["prompt_scores"]) < 39
    engine.update(1, other.named_parameters())
    resumed = EmbeddedEngine(small_decoder(), EngineOptions(batch_tokens=12))
    resumed.restore(state)
    for each, reference in ((engine, other), (resumed, small_decoder())):
        completions = []
        while each.unfinished:
            completions += each.step()
        (completion,) = completions
        expected = by_hand(reference, REQUESTS[3]).gather(1, torch.tensor(PROMPTS[3][1:])[:, None])[:, 0]
        assert completion.prompt_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
