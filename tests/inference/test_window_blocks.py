"""Models whose layers all have a window: blocks behind it are given back, and no answer hangs on it."""

from __future__ import annotations

import math

import pytest
from builders.rollout_requests import GREEDY, SAMPLED, cache_of, check_same, requests, slowly

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.scheduler import Scheduler

LONG = [5 + number % 40 for number in range(40)]
PROMPTS = [[*LONG[:24], 1, 2], [*LONG[:24], 3], [7, 8], LONG]
WIDEST = 9


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "drawn"])
def test_answers_are_those_without_a_cache(small_decoder, options):
    model, asked = small_decoder("sliding"), requests(options, 24, PROMPTS)
    engine = EmbeddedEngine(model, EngineOptions(block=4))
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        assert completion.tokens == slowly(model, request, guess=completion.tokens)[0]


def test_a_sequence_keeps_what_its_windows_see(small_decoder):
    def most_blocks(kind):
        engine = EmbeddedEngine(small_decoder(kind), EngineOptions(block=4))
        engine.submit(requests(GREEDY, 100, [[7, 8]])[0])
        used = []
        while engine.unfinished:
            engine.step()
            used.append(engine.statistics.blocks_used)
        return max(used)

    assert most_blocks("sliding") <= WIDEST // 4 + 2
    assert most_blocks("window") == most_blocks("llama") == 25  # controls: some layer sees everything


def test_answers_do_not_hang_on_pool_blocks_drafts_or_preemptions(small_decoder):
    model, asked = small_decoder("sliding"), requests(SAMPLED, 12, PROMPTS, samples=2)
    expected = EmbeddedEngine(model).generate(asked)
    for options in (
        EngineOptions(block=1, batch_tokens=5),
        EngineOptions(block=3, batch_tokens=64, sequences=3, prefix_sharing=False),
        EngineOptions(block=4, draft=DraftOptions("ngram", 3)),
        cache_of(model, 60, block=1, batch_tokens=32),
        cache_of(model, 60, block=1, batch_tokens=32, preempt="swap"),
        cache_of(model, 60, block=1, batch_tokens=32, preempt="swap", draft=DraftOptions("ngram", 3)),
    ):
        engine = EmbeddedEngine(model, options)
        for _ in range(2):  # the second time with what the prefix cache kept
            check_same(engine.generate(asked), expected)
        assert (engine.statistics.preemptions > 0) == (engine.statistics.blocks == 60)


def fill_free_blocks(engine, value):
    pool = engine._scheduler.pool
    free = [block for block in range(pool.blocks) if pool.is_free(block)]
    for tensors in engine._runner.pool._storage.values():
        for tensor in tensors:
            tensor[:, free] = value


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("block", [4, 16])
def test_what_becomes_of_blocks_that_were_given_back_does_not_matter(small_decoder, exact, block, monkeypatch):
    """They hold NaN as soon as they are free; a scheduler that gives back too much is the control."""
    model, asked = small_decoder("sliding"), requests(SAMPLED, 24, PROMPTS, samples=2)
    options = EngineOptions(block=block, exact=exact, prefix_sharing=False, cache_gib=3e-4)

    def answered(poisoned):
        engine, completions = EmbeddedEngine(model, options), []
        for request in asked:
            engine.submit(request)
        while engine.unfinished:
            completions += engine.step()
            if poisoned:
                fill_free_blocks(engine, math.nan)
        return sorted((one.number, one.sample, one.tokens, one.logprobs) for one in completions)

    expected = answered(poisoned=False)
    assert answered(poisoned=True) == expected
    narrow = max(1, WIDEST - 1 - block)
    monkeypatch.setattr(
        "danlu.inference.embedded.Scheduler", lambda *args, **more: Scheduler(*args, **{**more, "window": narrow})
    )
    assert answered(poisoned=True) != expected
