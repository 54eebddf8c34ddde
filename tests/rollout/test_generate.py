"""Generation against the obvious loop that runs the whole text through the model for every token."""

from __future__ import annotations

import pytest
import torch
from builders.reference_attention import ReferenceAttention

from danlu.errors import DataError, ModelError
from danlu.models.attend import PackedAttention
from danlu.models.config import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from danlu.models.saving import save
from danlu.rollout.cache import KVCache
from danlu.rollout.generate import generate, prefill, prefill_chunks
from danlu.rollout.request import SamplingOptions
from danlu.rollout.sampling import DrawRow, draw

GREEDY = SamplingOptions(temperature=0)
SCALINGS = [LinearScaling(4.0), DynamicScaling(4.0), Llama3Scaling(4.0, 1.0, 4.0, 16), YarnScaling(4.0, 16)]
PROMPTS = [[3, 9, 4], [7], [3, 9, 4], [11, 12, 13, 14, 15, 16, 17]]


def slowly(model, prompt, options, count, index=0, virtual_token_ids=()):
    """Tokens and log-probabilities without a cache, one sequence at a time."""
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        ids = torch.tensor([*virtual_token_ids, *tokens])
        hidden = model(ids, torch.arange(len(ids)), ReferenceAttention((0, len(ids))))
        drawn = draw(model.logits(hidden[-1:]), [DrawRow(options, index, 0, len(ids), tokens)])
        tokens.append(drawn.tokens[0])
        logprobs.append(drawn.logprobs[0])
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("kind", ["llama", "window", "softcap", "qk-norm"])
@pytest.mark.parametrize(
    "options", [GREEDY, SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=4)]
)
def test_equals_a_loop_of_full_passes(small_decoder, kind, options):
    model = small_decoder(kind)
    got = generate(model, PROMPTS, options, 24)
    for index, (prompt, completion) in enumerate(zip(PROMPTS, got, strict=True)):
        tokens, logprobs = slowly(model, prompt, options, 24, index)
        assert completion.tokens == tokens
        assert completion.finish == "length" and completion.text == ""
        torch.testing.assert_close(completion.logprobs, logprobs, atol=1e-4, rtol=1e-4)
    assert len({tuple(c.tokens) for c in got}) == (3 if options is GREEDY else 4)  # equal prompts draw apart


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(temperature=0.8, repetition_penalty=1.5, seed=4)])
def test_tokens_before_every_prompt_are_read_and_are_no_words_of_it(small_decoder, options):
    model = small_decoder()
    got = generate(model, PROMPTS, options, 12, virtual_token_ids=(5, 6))
    for index, (prompt, completion) in enumerate(zip(PROMPTS, got, strict=True)):
        assert completion.tokens == slowly(model, prompt, options, 12, index, virtual_token_ids=(5, 6))[0]
    assert [one.tokens for one in got] != [one.tokens for one in generate(model, PROMPTS, options, 12)]


def test_tokens_before_a_prompt_take_room(small_decoder):
    model = small_decoder(context=8)
    (completion,) = generate(model, [[1, 2]], GREEDY, 9, virtual_token_ids=(5, 6))
    assert completion.finish == "context" and len(completion.tokens) == 4
    with pytest.raises(DataError, match="prompt 0 has 6 tokens and the adapter 2, but the model sees 8 tokens at most"):
        generate(model, [[1] * 6], GREEDY, 1, virtual_token_ids=(5, 6))


def test_control_other_weights_give_other_text(small_decoder):
    assert (
        generate(small_decoder(seed=1), PROMPTS[:1], GREEDY, 24)[0].tokens
        != slowly(small_decoder(seed=0), PROMPTS[0], GREEDY, 24)[0]
    )


def test_stop_ids_end_rows_one_by_one_and_leave_the_others_alone(small_decoder):
    model = small_decoder()
    free = [c.tokens for c in generate(model, PROMPTS, GREEDY, 30)]
    stops = [free[1][2], free[3][8]]
    got = generate(model, PROMPTS, GREEDY, 30, stops)
    for completion, tokens in zip(got, free, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), 30)
        assert completion.tokens == tokens[:end]
        assert completion.finish == ("stop" if end < 30 or tokens[-1] in stops else "length")
        assert len(completion.logprobs) == end
    assert len({len(c.tokens) for c in got}) > 1


def test_text_streams_and_stop_strings_cut(small_decoder):
    model = small_decoder()

    def decode(tokens):
        return "".join(f"{token}," for token in tokens)

    plain = generate(model, PROMPTS[:2], GREEDY, 12, decode=decode)
    assert plain[0].text == decode(plain[0].tokens)
    stop = decode(plain[0].tokens[4:6])
    shown = {0: "", 1: ""}

    def on_token(index, token, text):
        shown[index] += text

    got = generate(model, PROMPTS[:2], GREEDY, 12, (), [stop[:-1]], on_token, decode=decode)
    assert got[0].text == plain[0].text[: plain[0].text.index(stop[:-1])] == shown[0]
    assert got[0].finish == "stop_string" and got[0].tokens == plain[0].tokens[: len(got[0].tokens)]
    assert got[1].text == shown[1]
    ended = generate(model, PROMPTS[:1], GREEDY, 12, [plain[0].tokens[3]], decode=decode)[0]
    assert ended.text == decode(ended.tokens[:-1])  # the stop token is a token of the answer, not of its text


def test_context_is_the_limit(small_decoder):
    model = small_decoder(context=10)
    got = generate(model, [[1, 2, 3], [4] * 9], GREEDY, 100)
    assert [(len(c.tokens), c.finish) for c in got] == [(7, "context"), (1, "context")]
    with pytest.raises(DataError, match=r"prompt 1 has 10 tokens, but the model sees 10 tokens at most"):
        generate(model, [[1], [4] * 10], GREEDY, 1)


def test_prompts_the_model_cannot_read(small_decoder):
    model = small_decoder()
    with pytest.raises(DataError, match="prompt 0 has no tokens"):
        generate(model, [[]], GREEDY, 1)
    with pytest.raises(DataError, match="prompt 1 has token 61, but the model's vocabulary has 61 tokens"):
        generate(model, [[1], [61, 2]], GREEDY, 1)
    assert generate(model, [], GREEDY, 1) == []


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions()])
def test_nan_weights_are_an_error(small_decoder, options):
    model = small_decoder()
    model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match=r"not finite at position 1: a weight may be NaN.* range of float32"):
        generate(model, [[1]], options, 3)


def test_prefill_in_small_passes_equals_one(small_decoder):
    model, prompts = small_decoder("window"), [[5, 6, 7, 8, 9, 10, 11], [1], [2, 3, 4]]
    whole, parts = KVCache(3), KVCache(3)
    expected = prefill(model, whole, prompts)
    torch.testing.assert_close(prefill(model, parts, prompts, budget=2), expected, atol=2e-5, rtol=1e-5)
    assert parts.lengths == whole.lengths == [7, 1, 3]
    assert prefill_chunks([3, 0, 4], budget=5) == [[3, 0, 2], [0, 0, 2]]


def test_sequences_side_by_side_go_by_their_own_lengths(small_decoder):
    model = small_decoder(context=16, rope_scaling=DynamicScaling(4.0))
    prompts = [[5 + n for n in range(length)] for length in (20, 21, 9)]  # neighbours in the batch and in length
    together = generate(model, prompts, GREEDY, 12)
    for prompt, one in zip(prompts, together, strict=True):
        alone = generate(model, [prompt], GREEDY, 12)[0]
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
def test_prefill_equals_the_forward_of_training_whatever_its_budget(small_decoder, scaling):
    model = small_decoder(context=16, rope_scaling=scaling)  # prompts lie on both sides of 16 tokens
    prompts = [[5 + n % 50 for n in range(40)], [1, 2], [3 + n % 7 for n in range(16)]]
    lengths = [len(prompt) for prompt in prompts]
    boundaries = (0, *torch.tensor(lengths).cumsum(0).tolist())
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model(
        torch.tensor([token for prompt in prompts for token in prompt]), positions, PackedAttention(boundaries)
    )
    expected = model.logits(hidden[[end - 1 for end in boundaries[1:]]])
    for budget in (1, 3, 16, 17, 1000):
        cache = KVCache(3)
        torch.testing.assert_close(prefill(model, cache, prompts, budget=budget), expected, atol=2e-5, rtol=1e-5)
        keys, _ = cache.buffers(2, hidden)  # what later tokens will see is the same too
        whole = KVCache(3)
        prefill(model, whole, prompts, budget=1000)
        torch.testing.assert_close(keys, whole.buffers(2, hidden)[0], atol=2e-5, rtol=1e-5)
    # Negative control: the comparison sees other frequencies.
    other = small_decoder(context=16)
    assert (prefill(other, KVCache(3), prompts) - expected).abs().max() > 1e-3


def test_bfloat16_weights_and_activations(small_decoder):
    model = small_decoder().to(torch.bfloat16)
    completion = generate(model, [[1, 2, 3]], GREEDY, 8)[0]
    assert len(completion.tokens) == 8
    wide = generate(model, [[1, 2, 3]], GREEDY, 8, dtype=torch.float32)[0]
    assert wide.logprobs != completion.logprobs
