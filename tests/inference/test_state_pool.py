"""Layers with a state in the engine: answers do not hang on who else is there, or on who had to make room."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch
from builders.rollout_requests import GREEDY, PROMPTS, SAMPLED, check_same, requests, slowly

from danlu.core.errors import ModelError, ResourceError
from danlu.core.layer_types import LayerCache
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.request import SamplingOptions
from danlu.inference.state_pool import StatePool
from danlu.models.decoder import Decoder, Layer
from danlu.planning.cache_memory import block_bytes, state_bytes

DRAWN = SamplingOptions(seed=3)
LONG = [5 + number % 40 for number in range(40)]
SHARED = [[*LONG[:24], 1, 2], [*LONG[:24], 3], LONG[:20], [7, 8], LONG]


def sizes(model: Decoder) -> tuple[int, int]:
    """Bytes of a sequence's states, and of a block of four tokens."""
    layers = [cast(Layer, layer).attention.cache for layer in model.layers.values()]
    return state_bytes(layers, 4), block_bytes(layers, 4, 4)


def options_for(model: Decoder, sequences: int, **settings: int) -> EngineOptions:
    """A cache of which the states of so many sequences take half."""
    gib = (2 * sequences * sizes(model)[0] + 1) / 2**30
    return EngineOptions(cache_gib=gib, block=4, **settings)


def test_sums_over_all_tokens_are_float32_whatever_activations_are():
    layer = LayerCache((), None, ((2, 3), (4,)))
    pool = StatePool([layer], 2, torch.bfloat16, torch.device("cpu"))
    slots, sums = torch.tensor([1]), torch.tensor([[1 / 3, 1e-3, 257.0, 1 + 2**-20]])
    pool.write(0, slots, [torch.ones(1, 2, 3, dtype=torch.bfloat16), sums])
    convolved, kept = pool.read(0, slots, None)
    assert (convolved.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(kept, sums) and not torch.equal(
        sums.bfloat16().float(), sums
    )  # control: in bf16 they are others
    assert state_bytes([layer], 2) == 6 * 2 + 4 * 4


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_of_the_loop_without_a_cache(small_decoder, sampling):
    model, asked = small_decoder("delta"), requests(sampling, 12, SHARED)
    for completion, request in zip(EmbeddedEngine(model).generate(asked), asked, strict=True):
        tokens, logprobs = slowly(model, request, guess=completion.tokens)
        assert list(completion.tokens) == tokens
        assert list(completion.logprobs) == pytest.approx(logprobs, abs=1e-4)


def test_answers_do_not_hang_on_chunks_slots_or_neighbours(small_decoder):
    model, asked = small_decoder("delta"), requests(SAMPLED, 12, SHARED, samples=2)
    expected = EmbeddedEngine(model).generate(asked)
    for options in (
        EngineOptions(block=1, batch_tokens=5),
        EngineOptions(block=3, batch_tokens=64, sequences=3),
        EngineOptions(block=8, batch_tokens=1),
    ):
        check_same(EmbeddedEngine(model, options).generate(asked), expected)
    alone = [completion for request in asked for completion in EmbeddedEngine(model).generate([request])]
    check_same(alone, expected)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_one_that_made_room_is_read_again(small_decoder, preempt):
    model, asked = small_decoder("delta"), requests(DRAWN, 30)
    tight = EmbeddedEngine(model, dataclasses.replace(options_for(model, 4), preempt=preempt, swap_gib=1.0))
    check_same(tight.generate(asked), EmbeddedEngine(model).generate(asked))
    assert tight.statistics.preemptions > 0 == tight.statistics.swaps
    assert tight.statistics.recomputed_tokens > 0


def test_answers_to_one_prompt_have_copies_of_its_state(small_decoder, monkeypatch):
    model, asked = small_decoder("delta"), requests(DRAWN, 8, SHARED, samples=3)
    engine = EmbeddedEngine(model)
    answers = engine.generate(asked)
    assert engine.statistics.prompt_tokens_computed == sum(map(len, SHARED))  # each prompt once, and nothing shared
    alone = [one for request in asked for one in EmbeddedEngine(model).generate([request])]
    check_same(answers, alone)
    for completion, request in zip(answers, [each for each in asked for _ in range(3)], strict=True):
        assert list(completion.tokens) == slowly(model, request, completion.sample, guess=completion.tokens)[0]
    monkeypatch.setattr(StatePool, "copy", lambda self, copies: None)
    assert [one.tokens for one in EmbeddedEngine(model).generate(asked)] != [one.tokens for one in answers]


def test_what_is_left_in_a_slot_is_never_read(small_decoder):
    model, asked = small_decoder("delta"), requests(DRAWN, 10)
    expected = EmbeddedEngine(model).generate(asked)
    engine = EmbeddedEngine(model)
    for _ in range(2):
        for tensors in engine._runner.pool.states._layers:
            for states in tensors:
                states.fill_(float("nan"))
        check_same(engine.generate(asked), expected)


def test_new_weights_and_sleep_begin_anew(small_decoder):
    model, asked = small_decoder("delta"), requests(DRAWN, 10)
    engine, expected = EmbeddedEngine(model), EmbeddedEngine(model).generate(asked)
    for request in asked:
        engine.submit(request)
    for _ in range(4):
        assert not engine.step()
    engine.update(0)
    engine.step()
    engine.sleep()
    engine.wake()
    check_same([one for _ in range(20) for one in engine.step()], expected)


def test_states_take_half_of_the_cache_at_most(small_decoder):
    model = small_decoder("delta")
    state, block = sizes(model)
    runner = EmbeddedEngine(model, options_for(model, 5))._runner
    assert runner.running_limit == runner.pool.states.slots == 5
    assert runner.pool.blocks == 5 * state // block
    allocated = sum(each.nbytes for tensors in runner.pool.states._layers for each in tensors)
    assert allocated == 5 * state
    with pytest.raises(ResourceError, match="does not hold one block of 4 tokens .* next to the state of a sequence"):
        EmbeddedEngine(model, EngineOptions(cache_gib=(state + block - 1) / 2**30, block=4))
    EmbeddedEngine(model, EngineOptions(cache_gib=(state + block) / 2**30, block=4))


def test_what_a_state_cannot_do_is_refused(small_decoder):
    model = small_decoder("delta")
    with pytest.raises(ModelError, match="numerics: exact does not hold for linear attention"):
        EmbeddedEngine(model, EngineOptions(exact=True))
    with pytest.raises(ModelError, match="draft: the model has linear attention"):
        EmbeddedEngine(model, EngineOptions(draft=DraftOptions("ngram")))
    with pytest.raises(ModelError, match="draft: the draft model has linear attention"):
        EmbeddedEngine(small_decoder(), EngineOptions(draft=DraftOptions("model")), draft_model=model)


def test_a_model_of_linear_attention_alone_needs_no_blocks(small_decoder):
    from builders.small_config import small_config

    config = small_config(layers=2, deltas=(0, 1))
    model = Decoder(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    asked = requests(GREEDY, 8, PROMPTS)
    for completion, request in zip(EmbeddedEngine(model).generate(asked), asked, strict=True):
        assert list(completion.tokens) == slowly(model, request, guess=completion.tokens)[0]


@pytest.mark.parametrize("case", ["qwen3_5_text", "qwen3_next"])
def test_greedy_answers_are_those_of_transformers(case, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from danlu.models.loading import load

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    config = AutoConfig.for_model(
        case,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **sizes,
        **(experts if case == "qwen3_next" else {}),
        **({"shared_expert_intermediate_size": 16} if case == "qwen3_next" else {}),
    )
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.25)
    theirs.save_pretrained(tmp_path)
    asked = requests(GREEDY, 20, SHARED)
    for completion, request in zip(EmbeddedEngine(load(tmp_path)).generate(asked), asked, strict=True):
        prompt = torch.tensor([request.prompt])
        expected = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert list(completion.tokens) == expected[0, len(request.prompt) :].tolist()
        assert len(set(completion.tokens)) > 3
