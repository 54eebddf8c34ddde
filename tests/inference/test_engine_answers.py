"""What ends an answer, how its text comes, and what it is over prompts of every length and scaling."""

from __future__ import annotations

import pytest
import torch
from builders.generation import generate
from builders.rollout_requests import GREEDY, requests, slowly

from danlu.core.errors import DataError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import NewToken, Request, SamplingOptions
from danlu.models.attend import PackedAttention
from danlu.models.rope_config import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from danlu.models.saving import save

SCALINGS = [LinearScaling(4.0), DynamicScaling(4.0), Llama3Scaling(4.0, 1.0, 4.0, 16), YarnScaling(4.0, 16)]
PROMPTS = [[3, 9, 4], [7], [3, 9, 4], [11, 12, 13, 14, 15, 16, 17]]


@pytest.mark.parametrize("kind", ["window", "softcap"])
def test_control_an_attend_without_window_or_softcap_is_noticed(small_decoder, kind, monkeypatch):
    model = small_decoder(kind)
    answers = [one.tokens for one in generate(model, PROMPTS, GREEDY, 24)]
    expected = [slowly(model, request, guess=guess)[0] for request, guess in zip(requests(), answers, strict=True)]
    assert answers == expected
    for layer in model.layers.values():
        monkeypatch.setattr(layer.attention, "window", None)
        monkeypatch.setattr(layer.attention, "softcap", None)
    assert [one.tokens for one in generate(model, PROMPTS, GREEDY, 24)] != expected


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(temperature=0.8, repetition_penalty=1.5, seed=4)])
def test_tokens_before_every_prompt_are_read_and_are_no_words_of_it(small_decoder, options):
    model = small_decoder()
    got = generate(model, PROMPTS, options, 12, virtual_token_ids=(5, 6))
    for request, completion in zip(requests(options, 12), got, strict=True):
        assert completion.tokens == slowly(model, request, 0, (5, 6), guess=completion.tokens)[0]
    assert [one.tokens for one in got] != [one.tokens for one in generate(model, PROMPTS, options, 12)]


def test_tokens_before_a_prompt_take_room(small_decoder):
    model = small_decoder(context=8)
    (completion,) = generate(model, [[1, 2]], GREEDY, 9, virtual_token_ids=(5, 6))
    assert completion.finish == "context" and len(completion.tokens) == 4
    with pytest.raises(DataError, match="prompt 0 has 6 tokens and the adapter 2, but the model sees 8 tokens at most"):
        generate(model, [[1] * 6], GREEDY, 1, virtual_token_ids=(5, 6))


def test_stop_ids_end_answers_one_by_one_and_leave_the_others_alone(small_decoder):
    model = small_decoder()
    free = [completion.tokens for completion in generate(model, PROMPTS, GREEDY, 30)]
    stops = [free[1][2], free[3][8]]
    got = generate(model, PROMPTS, GREEDY, 30, stops)
    for completion, tokens in zip(got, free, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), 30)
        assert completion.tokens == tokens[:end]
        assert completion.finish == ("stop" if end < 30 or tokens[-1] in stops else "length")
        assert len(completion.logprobs) == len(completion.drawn) == end
    assert len({len(completion.tokens) for completion in got}) > 1


def test_text_streams_and_stop_strings_cut(small_decoder):
    def decode(tokens):
        return "".join(f"{token}," for token in tokens)

    model = small_decoder()
    plain = generate(model, PROMPTS[:2], GREEDY, 12, decode=decode)
    assert plain[0].text == decode(plain[0].tokens)
    stop = decode(plain[0].tokens[4:6])[:-1]
    engine, shown = EmbeddedEngine(model, decode=decode), {0: "", 1: ""}

    def on_token(new: NewToken) -> None:
        shown[new.number] += new.text

    for number, prompt in enumerate(PROMPTS[:2]):
        engine.submit(Request(number, tuple(prompt), GREEDY, 12, stop_strings=(stop,)), on_token)
    answers = {}
    while engine.unfinished:
        answers |= {completion.number: completion for completion in engine.step()}
    assert answers[0].text == plain[0].text[: plain[0].text.index(stop)] == shown[0]
    assert answers[0].finish == "stop_string" and answers[0].tokens == plain[0].tokens[: len(answers[0].tokens)]
    assert answers[1].text == shown[1]
    (ended,) = generate(model, PROMPTS[:1], GREEDY, 12, [plain[0].tokens[3]], decode=decode)
    assert ended.text == decode(ended.tokens[:-1])  # the stop token is a token of the answer, not of its text


def test_context_is_the_limit(small_decoder):
    model = small_decoder(context=10)
    got = generate(model, [[1, 2, 3], [4] * 9], GREEDY, 100)
    assert [(len(completion.tokens), completion.finish) for completion in got] == [(7, "context"), (1, "context")]
    with pytest.raises(DataError, match=r"prompt 1 has 10 tokens, but the model sees 10 tokens at most"):
        generate(model, [[1], [4] * 10], GREEDY, 1)
    assert generate(model, [], GREEDY, 1) == []


def test_sequences_side_by_side_go_by_their_own_lengths(small_decoder):
    model = small_decoder(context=16, rope_scaling=DynamicScaling(4.0))
    prompts = [[5 + n for n in range(length)] for length in (20, 21, 9)]  # neighbours in the batch and in length
    together = generate(model, prompts, GREEDY, 12)
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = generate(model, [prompt], GREEDY, 12)
        assert one.tokens == alone.tokens
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.mark.parametrize("length", [9, 24])
@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=str)
def test_answers_are_those_of_transformers_at_every_scaling(small_decoder, scaling, length, tmp_path):
    from transformers import LlamaForCausalLM

    model = small_decoder(context=16 if isinstance(scaling, DynamicScaling) else 64, rope_scaling=scaling)
    save(model, tmp_path / "model", dtype=torch.float32)
    prompt = [5 + n for n in range(length)]
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=14, eos_token_id=-1, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    (mine,) = generate(model, [prompt], GREEDY, 14)  # from 9 tokens it grows beyond 16, from 24 it begins there
    assert mine.tokens == theirs.sequences[0, length:].tolist()
    logprobs = [one[0].log_softmax(-1).max().item() for one in theirs.logits]
    assert mine.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda one: one.kind)
def test_prompts_are_read_as_in_training_whatever_fits_into_a_pass(small_decoder, scaling):
    # Prompts lie on both sides of 16 tokens, from which the scalings go by.
    model = small_decoder(context=16 if isinstance(scaling, DynamicScaling) else 64, rope_scaling=scaling)
    prompts = [[5 + n % 50 for n in range(40)], [1, 2], [3 + n % 7 for n in range(16)]]
    lengths = [len(prompt) for prompt in prompts]
    boundaries = (0, *torch.tensor(lengths).cumsum(0).tolist())
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = model(tokens, positions, PackedAttention(boundaries))
    expected = model.logits(hidden[[end - 1 for end in boundaries[1:]]]).log_softmax(-1)  # [prompts, V]
    vocab_size = model.config.vocab_size

    def first_logprobs(decoder, **settings):
        """[prompts, V] at the first token of each answer."""
        options = EngineOptions(**settings)
        rows = torch.zeros_like(expected)
        for row, answer in zip(
            rows, generate(decoder, prompts, GREEDY, 1, options=options, top_logprobs=vocab_size), strict=True
        ):
            assert answer.top is not None
            for token, logprob in answer.top[0]:
                row[token] = logprob
        return rows

    for batch_tokens in (1, 3, 16, 17, 1000):
        got = first_logprobs(model, batch_tokens=batch_tokens)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    # Negative control: the comparison sees other frequencies.
    assert (first_logprobs(small_decoder(context=64)) - expected).abs().max() > 1e-3


def test_bfloat16_weights_and_activations(small_decoder):
    model = small_decoder().to(torch.bfloat16)
    (completion,) = generate(model, [[1, 2, 3]], GREEDY, 8)
    assert len(completion.tokens) == 8
    (wide,) = generate(model, [[1, 2, 3]], GREEDY, 8, dtype=torch.float32)
    assert wide.logprobs != completion.logprobs
