"""The embedded engine against the obvious loop that runs the whole text through the model for every token."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders.covering import fast
from builders.rollout_requests import GREEDY, SAMPLED, cache_of, check_same, requests, slowly
from builders.tiny_adapters import adapter_set, perturb

from danlu.core.errors import DataError, ModelError, ResourceError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.models.hf_config import read_config_values
from danlu.models.loading import build
from danlu.models.saving import save
from danlu.recipe.sections import Lora

KINDS = ("llama", "window", "softcap", "qk-norm", "sinks", "latent", "factorized", "key-reuse", "experts")


@pytest.mark.parametrize(
    ("kind", "options"),
    fast(
        itertools.product(KINDS, [GREEDY, SAMPLED]),
        *((kind, SAMPLED) for kind in KINDS),
        ("window", GREEDY),
        ("latent", GREEDY),
    ),
)
def test_equals_a_loop_of_full_passes(small_decoder, kind, options):
    model = small_decoder(kind)
    asked = requests(options, 16, samples=2)
    completions = EmbeddedEngine(model).generate(asked)
    places = [(request, sample) for request in asked for sample in range(2)]
    for (request, sample), completion in zip(places, completions, strict=True):
        tokens, logprobs = slowly(model, request, sample, guess=completion.tokens)
        assert (completion.number, completion.sample) == (request.number, sample)
        assert completion.tokens == tokens
        assert completion.finish == "length" and completion.text == "" and completion.versions == [0] * 16
        torch.testing.assert_close(completion.logprobs, logprobs, atol=1e-4, rtol=1e-4)
    # Negative control: other weights give other text.
    assert EmbeddedEngine(small_decoder(kind, seed=1)).generate(asked[:1])[0].tokens != completions[0].tokens


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_control_a_guess_changes_no_token_of_the_loop(small_decoder, options):
    model, (request,) = small_decoder("window"), requests(options, 8, [(3, 9, 4)])
    tokens, logprobs = slowly(model, request)
    for wrong in (0, 3, 6, 7):
        guess = [*tokens[:wrong], (tokens[wrong] + 1) % 61, *tokens[wrong + 1 :]]
        assert slowly(model, request, guess=guess)[0] == tokens
    for guess in (tokens, tokens[:5], [*tokens, 1, 2]):
        guessed = slowly(model, request, guess=guess)
        assert guessed[0] == tokens and guessed[1] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", ["sinks", "latent", "factorized", "key-reuse"])
def test_adapters_on_every_kind_of_attention(small_decoder, kind):
    """Caches hold what keys and values are made of, absorbed while tokens are drawn: with the adapters of that too."""
    model, (request,) = small_decoder(kind), requests(count=5, prompts=[(11, 12, 13, 14)])
    bare = slowly(model, request)
    adapters = adapter_set(model)
    adapters.add("made", Lora(rank=2))
    perturb(adapters, "made")
    (completion,) = EmbeddedEngine(model).generate([request])
    tokens, logprobs = slowly(model, request, guess=completion.tokens)
    assert completion.tokens == tokens
    torch.testing.assert_close(completion.logprobs, logprobs, atol=1e-4, rtol=1e-4)
    assert bare[0] != tokens or max(abs(x - y) for x, y in zip(bare[1], logprobs, strict=True)) > 1e-2  # the control


TWINS = {
    "llama": {"model_type": "llama"},
    "window": {"model_type": "mistral", "sliding_window": 7},
    "softcap": {
        "model_type": "gemma2",
        "sliding_window": 6,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 12,
    },
    "qk-norm": {"model_type": "qwen3", "num_key_value_heads": 1},
    "two-rotations": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 12,
        "rope_local_base_freq": 100.0,
    },
    "parallel": {"model_type": "gpt_neox", "num_key_value_heads": 4, "rotary_pct": 0.5},
    "parallel-windows": {"model_type": "cohere2", "sliding_window": 6, "sliding_window_pattern": 2, "eos_token_id": 2},
    "rotated-pairs": {"model_type": "glm4", "eos_token_id": None, "pad_token_id": None},
    "norms-behind": {"model_type": "olmo3", "sliding_window": 6},
    "unrotated": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "pad_token_id": None},
    "multipliers": {"model_type": "granite", "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "temperature": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "kind",
    fast(TWINS, "softcap", "qk-norm", "two-rotations", "parallel-windows", "rotated-pairs", "unrotated", "temperature"),
)
def test_greedy_answers_are_those_of_transformers(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    model = build(read_config_values({**SIZES, **TWINS[kind]})).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.3, generator=generator).add_("norm" in name)
    save(model, tmp_path / "model", dtype=torch.float32)
    # Of its kernels only "eager" has the soft cap.
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    asked = requests(count=20, prompts=[[3, 9, 4], [5 + number for number in range(21)]])
    for request, completion in zip(asked, EmbeddedEngine(model, EngineOptions(block=4)).generate(asked), strict=True):
        reference = twin.generate(
            torch.tensor([request.prompt]), do_sample=False, max_new_tokens=20, eos_token_id=-1, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert completion.tokens == reference.sequences[0, len(request.prompt) :].tolist()
        logprobs = [row[0].log_softmax(-1).max().item() for row in reference.logits]
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        # Negative control: log-probabilities do differ from token to token.
        assert completion.logprobs != pytest.approx(logprobs[1:] + logprobs[:1], abs=1e-2)


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


NAN_ROW = 17
"""A token that the decoders of the next tests have NaN for: whoever reads it has no answer."""


@pytest.mark.parametrize("where", ["prompt", "prompt scores"])
def test_what_one_request_fails_at_costs_the_others_nothing(small_decoder, where):
    """It is told what was wrong; without a way to tell it, the step raises as ever."""
    model = small_decoder()
    model.embed_tokens.weight[NAN_ROW] = float("nan")
    scored = where == "prompt scores"
    asked = [
        Request(number, prompt, SamplingOptions(seed=1), 6, samples=2, prompt_logprobs=scored)
        for number, prompt in enumerate([(3, 9, 4), (3, 9, NAN_ROW, 4), (7,), (5, NAN_ROW)])
    ]
    expected = EmbeddedEngine(model).generate([asked[0], asked[2]])
    engine, errors = EmbeddedEngine(model, EngineOptions(block=4)), []
    for request in asked:
        engine.submit(request, on_error=lambda error, number=request.number: errors.append((number, error)))
    done = []
    while engine.unfinished:
        done += engine.step()
    assert [number for number, _ in errors] == [1, 3]
    assert all(isinstance(error, ModelError) and "not finite at position" in str(error) for _, error in errors)
    assert {completion.number for completion in done if completion.finish == "abort"} == {1, 3}
    check_same([each for each in done if each.finish != "abort"], expected)
    assert engine.statistics.blocks_used == engine.statistics.running == engine.statistics.waiting == 0
    check_same(engine.generate([asked[0]]), expected[:2])  # and its number is free again
    with pytest.raises(ModelError, match="not finite"):  # control
        engine.generate([asked[1]])


def test_a_tokenizer_that_fails_at_one_answer_costs_the_others_nothing(small_decoder):
    def decode(ids):
        if len(ids) > 1:
            raise ValueError("no such token")
        return ""

    engine, errors = EmbeddedEngine(small_decoder(), decode=lambda ids: ""), []
    engine.submit(Request(0, (3,), GREEDY, 4), decode=decode, on_error=errors.append)
    engine.submit(Request(1, (3,), GREEDY, 4), on_error=errors.append)
    done = []
    while engine.unfinished:
        done += engine.step()
    assert [str(error) for error in errors] == ["no such token"]
    assert {each.number: each.finish for each in done} == {0: "abort", 1: "length"}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", [[7], [3, 9, 4]])
def test_as_many_samples_as_a_prompt_has_tokens_or_more(small_decoder, prompt, options):
    model = small_decoder()
    asked = requests(options, 6, [prompt], samples=3)
    for sample, completion in enumerate(EmbeddedEngine(model).generate(asked)):
        assert completion.tokens == slowly(model, asked[0], sample, guess=completion.tokens)[0]


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
