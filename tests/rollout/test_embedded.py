"""The embedded engine against the obvious loop that runs the whole text through the model for every token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from builders.reference_attention import ReferenceAttention

from danlu.errors import DataError, ModelError, ResourceError
from danlu.rollout.embedded import EmbeddedEngine
from danlu.rollout.engine import EngineOptions
from danlu.rollout.pool import CachePool
from danlu.rollout.request import Request, SamplingOptions
from danlu.rollout.sampling import DrawRow, SeenTokens, draw

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=4)
PROMPTS = [[3, 9, 4], [7], [3, 9, 4], [11, 12, 13, 14, 15, 16, 17]]


def requests(options=GREEDY, count=24, prompts=PROMPTS, **settings):
    return [Request(number, tuple(prompt), options, count, **settings) for number, prompt in enumerate(prompts)]


def cache_of(model, blocks, block=16, **settings):
    """Options with a cache of so many blocks."""
    layers = [layer.attention.cache for layer in model.layers.values()]
    size = CachePool.block_bytes(layers, block, torch.float32)
    return EngineOptions(block=block, cache_gib=(blocks + 0.5) * size / 2**30, swap_gib=1000 * size / 2**30, **settings)


def check_same(completions, expected):
    """Equal but for the rounding of log-probabilities, which follows the size of a pass unless numerics are exact."""
    for completion, reference in zip(completions, expected, strict=True):
        numbers = [*reference.logprobs, *reference.drawn]
        assert [*completion.logprobs, *completion.drawn] == pytest.approx(numbers, abs=1e-4)
        assert dataclasses.replace(completion, logprobs=reference.logprobs, drawn=reference.drawn) == reference


def slowly(model, request, sample=0, virtual_token_ids=()):
    """Tokens and log-probabilities without a cache, one sequence at a time."""
    tokens, logprobs, seen = [*virtual_token_ids, *request.prompt], [], SeenTokens(request.prompt)
    start = len(tokens)
    for _ in range(request.max_new_tokens):
        ids = torch.tensor(tokens)
        hidden = model(ids, torch.arange(len(ids)), ReferenceAttention((0, len(ids))))
        row = DrawRow(request.sampling, request.number, sample, len(ids), seen.ids)
        drawn = draw(model.logits(hidden[-1:]), [row])
        tokens += drawn.tokens
        logprobs += drawn.logprobs
        seen.add(drawn.tokens[0])
    return tokens[start:], logprobs


@pytest.mark.parametrize("kind", ["llama", "window", "softcap", "qk-norm"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_equals_a_loop_of_full_passes(small_decoder, kind, options):
    model = small_decoder(kind)
    asked = requests(options, samples=2)
    completions = iter(EmbeddedEngine(model).generate(asked))
    for request in asked:
        for sample in range(2):
            completion = next(completions)
            tokens, logprobs = slowly(model, request, sample)
            assert (completion.number, completion.sample) == (request.number, sample)
            assert completion.tokens == tokens
            assert completion.finish == "length" and completion.text == "" and completion.versions == [0] * 24
            torch.testing.assert_close(completion.logprobs, logprobs, atol=1e-4, rtol=1e-4)
    # Negative control: other weights give other text.
    assert EmbeddedEngine(small_decoder(kind, seed=1)).generate(asked)[0].tokens != slowly(model, asked[0])[0]


def test_prompts_the_model_cannot_read(small_decoder):
    engine = EmbeddedEngine(small_decoder())
    with pytest.raises(DataError, match="prompt 0 has no tokens"):
        engine.generate(requests(prompts=[[]]))
    with pytest.raises(DataError, match="prompt 1 has token 61, but the model's vocabulary has 61 tokens"):
        engine.generate(requests(prompts=[[1], [61, 2]]))
    with pytest.raises(DataError, match="prompt 0: no adapter 'b'; the engine has none to switch between"):
        engine.generate(requests(adapter="b"))
    assert engine.unfinished == 0 and engine.generate([]) == []


def test_a_request_larger_than_the_cache_is_refused(small_decoder):
    model = small_decoder()
    engine = EmbeddedEngine(model, cache_of(model, blocks=2))
    with pytest.raises(
        ResourceError, match=r"prompt 1: 7 tokens with an answer of up to 27 need .* Set rollout.cache_gib"
    ):
        engine.generate(requests(prompts=[[1], [2] * 7], count=27))
    assert len(engine.generate(requests(prompts=[[2] * 7], count=26))[0].tokens) == 26  # the last is not cached
    with pytest.raises(ResourceError, match="cache_gib: 1e-07 does not hold one block of 16 tokens"):
        EmbeddedEngine(model, EngineOptions(cache_gib=1e-7))


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions()])
def test_nan_weights_are_an_error_and_nothing_is_lost(small_decoder, options):
    model = small_decoder()
    engine = EmbeddedEngine(model)
    engine.submit(Request(0, (1,), options, 3))
    engine.step()
    good = model.norm.weight[0].item()
    model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match=r"not finite at position 2: a weight may be NaN.* range of float32"):
        engine.step()
    model.norm.weight[0] = good
    done = [completion for _ in range(2) for completion in engine.step()]
    check_same(done, EmbeddedEngine(model).generate([Request(0, (1,), options, 3)]))


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", [[7], [3, 9, 4]])
def test_as_many_samples_as_a_prompt_has_tokens_or_more(small_decoder, prompt, options):
    model = small_decoder()
    asked = requests(options, 6, [prompt], samples=3)
    for sample, completion in enumerate(EmbeddedEngine(model).generate(asked)):
        assert completion.tokens == slowly(model, asked[0], sample)[0]


def test_what_is_aborted_before_its_first_step_comes_back_empty(small_decoder):
    engine = EmbeddedEngine(small_decoder())
    for request in requests(samples=2):
        engine.submit(request)
    engine.abort(1)
    engine.abort(99)  # not there: nothing happens
    assert engine.unfinished == 8
    done = engine.step()
    assert [(one.number, one.sample, one.tokens, one.finish) for one in done] == [
        (1, 0, [], "abort"),
        (1, 1, [], "abort"),
    ]
    assert engine.unfinished == 6
    engine.abort(0)
    assert {(one.number, len(one.tokens), one.finish) for one in engine.step()} == {(0, 1, "abort")}
    engine.abort(2)
    engine.abort(3)
    assert len(engine.step()) == 4 and engine.unfinished == engine.statistics.blocks_used == 0
