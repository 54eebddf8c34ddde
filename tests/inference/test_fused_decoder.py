"""Decoding in few calls is that of the modules but for rounding; where anything else takes part it is left to them."""

from __future__ import annotations

import pytest
import torch
from builders.generation import generate
from builders.small_config import small_config
from torch import nn

from danlu.inference import model_runner
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.fused_decoder import FusedDecoder
from danlu.inference.request import Request, SamplingOptions
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.modules import Linear
from danlu.models.packed_weights import PackedWeights, can_pack
from danlu.models.rope_config import DynamicScaling, YarnScaling
from danlu.numerics.format import WHOLE, Format
from danlu.numerics.scaled_weight import ScaledWeight

GREEDY = SamplingOptions(temperature=0)
ALIKE = [[3, 9, 4], [7, 2, 5], [11, 12, 13]]
RAGGED = [[3, 9, 4, 8], [7, 2, 5], [11, 12, 13]]
CHANGES = {
    "llama": {},
    "qk-norm": {"qk_norm": "head", "kv_heads": 1},
    "biases": {"qkv_bias": True, "o_bias": True, "bias": True},
    "gelu": {"activation": "gelu_tanh", "norm_offset": 1.0},
    "yarn": {"rope_scaling": YarnScaling(4.0, 16)},
    "scale": {"scale": 3.0**-0.5, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def decoder():
    """A function: changes of the config, as `small_config` has them -> a random decoder."""

    def make(**changes):
        model = Decoder(small_config(**{"layers": 3, **changes}))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
                if name.endswith("norm.weight"):
                    parameter.add_(1.0 - model.config.norm_offset)
        return model.requires_grad_(False)

    return make


def fused_of(model, dtype=torch.float32, limit=1 << 30):
    return FusedDecoder.of(model, PackedWeights(limit), dtype)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of sequences of the passes that fused decoders computed."""
    rows = []

    class Counted(FusedDecoder):
        def __call__(self, tokens, *rest):
            rows.append(len(tokens))
            return super().__call__(tokens, *rest)

    monkeypatch.setattr(model_runner, "FusedDecoder", Counted)
    return rows


def by_modules(monkeypatch, *arguments, **named):
    """The answers of an engine that has no fused decoder."""
    with monkeypatch.context() as patched:
        patched.setattr(FusedDecoder, "of", classmethod(lambda *_: None))
        return generate(*arguments, **named)


@pytest.mark.parametrize("prompts", [ALIKE, RAGGED, ALIKE[:1]], ids=["alike", "ragged", "one"])
@pytest.mark.parametrize("kind", CHANGES)
def test_answers_are_those_of_the_modules(decoder, calls, monkeypatch, kind, prompts):
    model = decoder(**CHANGES[kind])
    settings = EngineOptions(block=4)
    got = generate(model, prompts, GREEDY, 12, options=settings)
    assert calls == [len(prompts)] * 11  # the first token comes of the prompt
    expected = by_modules(monkeypatch, model, prompts, GREEDY, 12, options=settings)
    assert len(calls) == 11
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)


@pytest.mark.parametrize("part", ["attention_norm.weight", "attention.k_proj.weight", "mlp.up_proj.weight"])
def test_control_another_weight_is_noticed(decoder, monkeypatch, part):
    model = decoder()
    (expected,) = by_modules(monkeypatch, model, ALIKE[:1], GREEDY, 12)
    model.layers["1"].get_parameter(part).mul_(1.01)
    (got,) = generate(model, ALIKE[:1], GREEDY, 12)
    assert got.logprobs[1:] != pytest.approx(expected.logprobs[1:], abs=2e-5)


@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no packed products of bfloat16"
)
def test_bfloat16_is_as_near_as_the_modules_are(decoder, calls, monkeypatch):
    model = decoder().to(torch.bfloat16)
    sampled = SamplingOptions(temperature=0)
    (got,) = generate(model, ALIKE[:1], sampled, 6)
    assert calls
    (expected,) = by_modules(monkeypatch, model, ALIKE[:1], sampled, 6)
    assert got.logprobs == pytest.approx(expected.logprobs, abs=0.1)


FEW_BITS = {
    "int8": Format("int8", (1, WHOLE), narrow_range=True),
    "int4": Format("int4", (1, 32)),
    "int4 with zeros": Format("int4", (1, 32), zero="integer"),
}


def in_few_bits(model, form):
    for linear in [each for each in model.layers.modules() if isinstance(each, Linear)]:
        linear.store(ScaledWeight.quantize(linear.stored_weight, form))
    return model


def error(model, answers):
    """The root of the mean square of differences from a model's log-probabilities of answers to `ALIKE`."""
    differences = []
    for prompt, answer in zip(ALIKE, answers, strict=True):
        ids, places = torch.tensor([*prompt, *answer.tokens]), torch.arange(len(prompt) + len(answer.tokens))
        with torch.inference_mode():
            hidden = model(ids, places, PackedAttention((0, len(ids))), torch.float32)
            logprobs = model.logits(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = logprobs.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
        differences.append(torch.tensor(answer.logprobs) - wanted)
    return float(torch.cat(differences).square().mean().sqrt())


@pytest.mark.parametrize(("form", "kind"), [("int8", "qk-norm"), ("int4", "llama"), ("int4 with zeros", "biases")])
def test_weights_in_few_bits_are_as_near_as_by_the_modules(decoder, calls, monkeypatch, form, kind):
    """To the same numbers in float32; the control has one matrix of another layer."""
    changes = {"intermediate_size": 64, **CHANGES[kind]}
    model = in_few_bits(decoder(**changes).to(torch.bfloat16), FEW_BITS[form])
    exact = in_few_bits(decoder(**changes), FEW_BITS[form])
    exact.load_state_dict(model.state_dict())  # norms, embedding and biases in bfloat16
    fused = generate(model, ALIKE, GREEDY, 12)
    assert calls == [len(ALIKE)] * 11
    modules = by_modules(monkeypatch, model, ALIKE, GREEDY, 12)
    assert error(exact, fused) < 1.5 * error(exact, modules) < 0.1
    layers = model.layers
    layers["1"].mlp.down_proj.store(layers["2"].mlp.down_proj.quantized)
    assert error(exact, generate(model, ALIKE, GREEDY, 12)) > 0.3


def test_codes_that_change_are_taken_up(decoder):
    model = in_few_bits(decoder(intermediate_size=64), FEW_BITS["int4"])
    fused = fused_of(model, torch.bfloat16)
    assert fused is not None and fused.is_current
    model.layers["1"].attention.o_proj.quantized.scales.mul_(2)
    assert not fused.is_current


def test_weights_that_change_are_taken_up(decoder, calls):
    model = decoder()
    engine = EmbeddedEngine(model)

    def answer(number):
        return engine.generate([Request(number, (3, 9, 4), GREEDY, 6)])[0].logprobs

    before = answer(0)
    model.layers["0"].mlp_norm.weight.mul_(1.5)  # torch counts this: no update is needed
    changed = answer(0)
    assert changed == pytest.approx(generate(model, ALIKE[:1], GREEDY, 6)[0].logprobs, abs=1e-5)
    model.layers["0"].mlp_norm.weight.data.div_(1.5)  # and does not count this
    engine.update(1)
    assert changed != pytest.approx(before, abs=1e-3) and answer(0) == pytest.approx(before, abs=1e-5)
    assert len(calls) == 20


def test_what_takes_part_besides_is_left_to_the_modules(decoder):
    assert fused_of(decoder()) is not None
    for changes in (
        {"windows": (5, None, 5)},
        {"softcap": 3.0},
        {"sinks": True},
        {"output_gate": True},
        {"qk_norm": "head", "norm_behind_rope": True},
        {"value_norm": True},
        {"values_are_keys": True},
        {"scalar": True},
        {"norms": "sandwich"},
        {"norms": "post"},
        {"rope_scaling": DynamicScaling(4.0)},
    ):
        assert fused_of(decoder(**changes)) is None, changes

    def hooked(model):
        model.layers["1"].register_forward_pre_hook(lambda *_: None)

    def followed(model):
        model.layers["1"].after_mlp = nn.Identity()

    def entered(model):
        model.layers["1"].enter = nn.Identity()

    def adapted(model):
        model.layers["1"].attention.o_proj.adapter = nn.Identity()

    def quantized_in_part(model):
        model.layers["1"].attention.k_proj.store(nn.Identity())

    def without_bias(model):
        model.layers["1"].mlp.down_proj.adds_bias = False

    def prefixed(model):
        model.layers["1"].attention.prefix = nn.Identity()

    for change in (hooked, followed, entered, adapted, quantized_in_part, without_bias, prefixed):
        model = decoder()
        change(model)
        assert fused_of(model) is None, change.__name__


def test_no_room_for_copies_leaves_it_to_the_modules(decoder):
    assert fused_of(decoder(), limit=1000) is None


def test_prompts_drafts_and_exact_numerics_are_computed_by_the_modules(decoder, calls):
    model = decoder()
    generate(model, ALIKE, GREEDY, 1)
    assert calls == []
    drafting = EmbeddedEngine(model, EngineOptions(draft=DraftOptions(tokens=3)))
    (drafted,) = drafting.generate([Request(0, (5, 6, 5, 6, 5), GREEDY, 24)])
    assert drafting.statistics.drafts_proposed > 0 and len(calls) < 23
    assert drafted.tokens == generate(model, [[5, 6, 5, 6, 5]], GREEDY, 24)[0].tokens
    calls.clear()
    generate(model, ALIKE, GREEDY, 4, options=EngineOptions(exact=True))
    assert calls == []


def test_passes_of_both_kinds_read_what_the_other_wrote(decoder, calls):
    model = decoder()
    engine = EmbeddedEngine(model, EngineOptions(block=4))
    request = Request(0, (3, 9, 4), GREEDY, 16)
    (expected,) = engine.generate([request])
    engine.update(1)
    engine.submit(request)
    for _ in range(6):
        engine.step()
    # A second answer begins: its prompt and the first one's token are one pass of the modules, over the pool.
    engine.submit(Request(1, (7, 2, 5, 6, 8, 4, 3, 9), GREEDY, 3))
    completions = []
    while engine.unfinished:
        completions += engine.step()
    (got,) = [completion for completion in completions if completion.number == 0]
    assert got.tokens == expected.tokens and got.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert 2 in calls


def test_answers_that_end_leave_the_others_alone(decoder, calls, monkeypatch):
    """Buffers keep the rows of a few that have ended; their tokens are not written where others' are."""
    model, lengths = decoder(), [4 + 2 * number for number in range(9)]
    requests = [Request(number, (3, 9, 4 + number), GREEDY, length) for number, length in enumerate(lengths)]
    settings = EngineOptions(block=4)
    got = EmbeddedEngine(model, settings).generate(requests)
    with monkeypatch.context() as patched:
        patched.setattr(FusedDecoder, "of", classmethod(lambda *_: None))
        expected = EmbeddedEngine(model, settings).generate(requests)
    assert 9 in calls and 8 in calls
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
