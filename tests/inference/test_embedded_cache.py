"""What the engine answers does not hang on its cache: on its size, on who else is there, on what was there before."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from builders.covering import fast
from builders.rollout_requests import GREEDY, SAMPLED, cache_of, check_same, requests, slowly

from danlu.core.errors import DataError, ModelError
from danlu.inference.blocks import BlockPool
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.pool import CachePool
from danlu.inference.request import SamplingOptions
from danlu.models.rope_config import DynamicScaling

DRAWN = SamplingOptions(seed=3)
LONG = [5 + number % 40 for number in range(40)]
SHARED = [[*LONG[:24], 1, 2], [*LONG[:24], 3], LONG[:20], [7, 8], LONG]


@pytest.mark.parametrize("kind", fast(["window", "latent", "key-reuse"], "window", "latent"))
def test_answers_do_not_hang_on_pool_blocks_budget_or_neighbours(small_decoder, kind):
    model, asked = small_decoder(kind), requests(SAMPLED, 12, SHARED, samples=2)
    expected = EmbeddedEngine(model).generate(asked)
    for options in (
        EngineOptions(block=1, batch_tokens=5),
        EngineOptions(block=3, batch_tokens=64, sequences=3),
        EngineOptions(block=8, prefix_sharing=False),
        cache_of(model, 9, block=8, batch_tokens=32),
        cache_of(model, 9, block=8, batch_tokens=32, preempt="swap"),
    ):
        engine = EmbeddedEngine(model, options)
        check_same(engine.generate(asked), expected)
        assert (engine.statistics.preemptions > 0) == (engine.statistics.blocks == 9)
    alone = [completion for request in asked for completion in EmbeddedEngine(model).generate([request])]
    check_same(alone, expected)


def test_answers_do_not_hang_on_the_order_of_arrival(small_decoder):
    model, asked = small_decoder(), requests(DRAWN, 12, SHARED, samples=2)
    expected = {(one.number, one.sample): one for one in EmbeddedEngine(model).generate(asked)}
    engine, done = EmbeddedEngine(model, cache_of(model, 20, block=4, batch_tokens=16)), []
    waiting = random.Random(0).sample(asked, len(asked))
    while waiting or engine.unfinished:
        if waiting:
            engine.submit(waiting.pop())
        done += engine.step() + engine.step()
    check_same(done, [expected[one.number, one.sample] for one in done])
    assert len(done) == len(expected)


@pytest.mark.parametrize(
    ("options", "preempt"),
    fast(itertools.product([GREEDY, DRAWN], ["recompute", "swap"]), (DRAWN, "recompute"), (GREEDY, "swap")),
)
def test_preempted_is_undisturbed(small_decoder, options, preempt):
    model, asked = small_decoder(), requests(options, 30)
    roomy, tight = EmbeddedEngine(model), EmbeddedEngine(model, cache_of(model, 11, block=4, preempt=preempt))
    check_same(tight.generate(asked), roomy.generate(asked))
    statistics = tight.statistics
    assert statistics.preemptions > 0 == roomy.statistics.preemptions
    assert (statistics.swaps > 0) == (preempt == "swap") and (statistics.recomputed_tokens > 0) == (preempt != "swap")
    assert statistics.blocks_used == 0 and statistics.peak_blocks == 11


def test_a_full_host_falls_back_to_recompute(small_decoder):
    model, asked = small_decoder(), requests(DRAWN, 30)
    options = cache_of(model, 11, block=4, preempt="swap")
    engine = EmbeddedEngine(model, dataclasses.replace(options, swap_gib=options.swap_gib / 500))  # two blocks
    check_same(engine.generate(asked), EmbeddedEngine(model).generate(asked))
    assert engine.statistics.swap_fallbacks > 0 and engine.statistics.recomputed_tokens > 0


def answers_over_nan(model, asked):
    """Twice, in a pool whose blocks hold NaN before."""
    engine = EmbeddedEngine(model, cache_of(model, 12, block=4, prefix_sharing=False))
    for _ in range(2):
        for layer in range(len(model.config.layers)):
            for tensor in engine._runner.pool.tensors(layer):
                tensor.fill_(float("nan"))
        yield engine.generate(asked)


def test_nan_in_recycled_blocks_is_noticed_by_nobody(small_decoder):
    model, asked = small_decoder(), requests(DRAWN, 10)
    expected = EmbeddedEngine(model).generate(asked)
    for completions in answers_over_nan(model, asked):
        check_same(completions, expected)


def test_control_blocks_that_are_not_cleared_are_noticed(small_decoder, monkeypatch):
    carry_out = CachePool.carry_out
    monkeypatch.setattr(CachePool, "carry_out", lambda pool, plan: carry_out(pool, dataclasses.replace(plan, fresh=())))
    with pytest.raises(ModelError, match="not finite"):
        list(answers_over_nan(small_decoder(), requests(DRAWN, 10)))


def test_waste_is_less_than_a_block_a_sequence(small_decoder):
    engine = EmbeddedEngine(small_decoder(), EngineOptions(block=4))
    engine.generate(requests(count=30))
    statistics = engine.statistics
    assert statistics.generated_tokens == 4 * 30
    assert 0 < statistics.empty_slots <= statistics.passes * 4 * 3
    assert 0 < statistics.wasted < 0.2
    assert EmbeddedEngine(small_decoder()).statistics.wasted == 0


def test_equal_beginnings_are_read_once(small_decoder):
    model, asked = small_decoder(), requests(DRAWN, 6, SHARED, samples=2)
    shared, apart = (
        EmbeddedEngine(model, EngineOptions(block=4)),
        EmbeddedEngine(model, EngineOptions(block=4, prefix_sharing=False)),
    )
    check_same(shared.generate(asked), apart.generate(asked))
    assert apart.statistics.prompt_tokens_computed == sum(map(len, SHARED))
    assert shared.statistics.prompt_tokens_computed == sum(map(len, SHARED)) - 24 - 16 - 24  # the last is read, cached
    again = requests(DRAWN, 6, SHARED)
    shared.generate(again)
    assert shared.statistics.blocks_used == 0 < shared.statistics.blocks_cached


@pytest.fixture
def stale(monkeypatch):
    """Engines whose prefix cache survives everything."""
    monkeypatch.setattr("danlu.inference.embedded.root_digest", lambda adapter, version: b"root")
    pools = {}
    monkeypatch.setattr(
        "danlu.inference.embedded.BlockPool", lambda blocks: pools.setdefault(blocks, BlockPool(blocks))
    )


def answer_before_and_after_an_update(model, other):
    engine = EmbeddedEngine(model, EngineOptions(block=4))
    before = engine.generate(requests(count=8, prompts=[LONG]))[0]
    engine.update(1, other.named_parameters())
    after = engine.generate(requests(count=8, prompts=[LONG]))[0]
    assert (before.versions, after.versions) == ([0] * 8, [1] * 8)
    return after.tokens, after.logprobs


def test_nothing_is_cached_across_an_update(small_decoder):
    other = small_decoder(seed=1)
    tokens, logprobs = answer_before_and_after_an_update(small_decoder(), other)
    expected = slowly(other, requests(count=8, prompts=[LONG])[0])
    assert tokens == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-4)


def test_control_a_prefix_cache_that_survives_an_update_is_noticed(small_decoder, stale):
    other = small_decoder(seed=1)
    tokens, logprobs = answer_before_and_after_an_update(small_decoder(), other)
    expected = slowly(other, requests(count=8, prompts=[LONG])[0])
    assert tokens != expected[0] or logprobs != pytest.approx(expected[1], abs=1e-4)


@pytest.mark.parametrize("length", [9, 14, 24])
def test_lengths_that_rotate_do_not_hang_on_preemption_or_chunks(small_decoder, length):
    model = small_decoder(context=16, rope_scaling=DynamicScaling(4.0))
    prompts = [[5 + number for number in range(length + more)] for more in (0, 0, 1)]
    asked = requests(DRAWN, 20, prompts, samples=2)
    expected = EmbeddedEngine(model).generate(asked)
    tight = EmbeddedEngine(model, cache_of(model, 16, block=4, batch_tokens=7))
    check_same(tight.generate(asked), expected)
    assert tight.statistics.preemptions > 0


def test_keys_that_were_rotated_for_another_length_are_not_shared(small_decoder):
    model = small_decoder(context=16, rope_scaling=DynamicScaling(4.0))
    engine = EmbeddedEngine(model, EngineOptions(block=4))
    for prompt, reused in ((LONG[:12], 0), (LONG[:10], 8), (LONG[:20], 0), (LONG[:22], 0)):
        before = engine.statistics.prompt_tokens_reused
        engine.generate(requests(count=2, prompts=[prompt]))
        assert engine.statistics.prompt_tokens_reused - before == reused


def test_exact_numerics_refuse_texts_that_training_rotates_in_another_way(small_decoder, monkeypatch):
    monkeypatch.setattr("danlu.numerics.batch_invariant.enable", lambda: None)
    model = small_decoder(context=16, rope_scaling=DynamicScaling(4.0))
    engine = EmbeddedEngine(model, EngineOptions(exact=True))
    with pytest.raises(DataError, match="prompt 3: 7 tokens with an answer of up to 10: past 16 tokens dynamic rotary"):
        engine.generate(requests(count=10))
    engine.submit(requests(count=9)[3])  # 16 tokens in all
    EmbeddedEngine(model).submit(requests(count=10)[3])


def test_draws_follow_seed_number_sample_and_position(small_decoder):
    model = small_decoder()

    def tokens(number=0, sample=0, seed=0, **settings):
        request = dataclasses.replace(requests(SamplingOptions(seed=seed), 12, **settings)[0], number=number, samples=2)
        return EmbeddedEngine(model).generate([request])[sample].tokens

    assert tokens() == tokens()
    assert len({tuple(drawn) for drawn in (tokens(), tokens(number=1), tokens(sample=1), tokens(seed=1))}) == 4
    assert tokens(number=7, draw_number=0) == tokens()  # a request may repeat another's draws


def test_the_answer_after_two_tokens_is_that_of_the_longer_prompt(small_decoder):
    """Positions count from the beginning of the sequence, so that a prompt may be cut anywhere."""
    model, asked = small_decoder(), requests(DRAWN, 10, [[3, 9, 4]])
    tokens = EmbeddedEngine(model).generate(asked)[0].tokens
    later = EmbeddedEngine(model).generate(requests(DRAWN, 8, [[3, 9, 4, *tokens[:2]]]))[0].tokens
    assert later == tokens[2:]


def test_bfloat16_cache(small_decoder):
    model = small_decoder().to(torch.bfloat16)
    engine = EmbeddedEngine(model, cache_of(model, 30, block=4))
    assert engine.statistics.blocks == 61  # twice as many of half the size
    assert len(engine.generate(requests(count=5))) == 4
    wide = EmbeddedEngine(model, cache_of(model, 30, block=4), dtype=torch.float32)
    assert wide.statistics.blocks == 30
