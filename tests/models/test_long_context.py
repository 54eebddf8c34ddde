"""Configs scaled for longer documents: transformers loads what is written, and computes the same at both lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from danlu.core.errors import ModelError
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.hf_folder import read_config
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.long_context import original_length, ropes_by_length, with_long_context
from danlu.models.rope_config import DynamicScaling, LinearScaling, LongRopeScaling, YarnScaling
from danlu.models.saving import save
from danlu.recipe.sections import LengthStage, LongContext

TRAINED, LENGTH = 16, 48
LONGROPE = {"long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.0], "short_factor": [1.0, 1.0, 1.0, 1.1, 1.1, 1.2]}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {},
    "ntk": {},
    "dynamic": {},
    "yarn": {},
    "longrope": LONGROPE,
}


def section(method: str, **more: Any) -> LongContext:
    return LongContext(method=method, original_length=TRAINED, **METHODS[method], **more)  # type: ignore[arg-type]


def decoder(values: dict[str, Any], scaled: LongContext | None) -> Decoder:
    model = build(with_long_context(read_config_values(values), scaled, LENGTH))
    initialize(model, 0)
    with torch.no_grad():  # so that scores tell positions apart
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(8)
    return model


def logits(model: Decoder, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        attend = PackedAttention((0, len(tokens)))
        return model.logits(model(tokens, torch.arange(len(tokens)), attend, **options))


def tokens_of(length: int) -> torch.Tensor:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("method", METHODS)
def test_transformers_computes_the_same_of_the_written_config(
    method: str, tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    values = tiny_values("llama-2")
    model = decoder(values, section(method))
    save(model, tmp_path)
    assert read_config(tmp_path) == model.config
    for length in (TRAINED - 3, LENGTH):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        tokens = tokens_of(length)
        with torch.no_grad():
            expected = theirs(tokens[None]).logits[0]
        torch.testing.assert_close(logits(model, tokens), expected, atol=1e-5, rtol=0)
    unscaled = logits(decoder(values, None), tokens)
    assert ((unscaled - expected).abs().max() > 1e-2) == (method != "none")


def test_each_method_has_its_form(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    config = read_config_values(tiny_values("llama-2"))

    def scaled(method: str) -> Any:
        changed = with_long_context(config, section(method), LENGTH)
        return changed.max_position_embeddings, changed.ropes[0]

    assert scaled("none") == (64, config.ropes[0])
    assert [scaled(method)[0] for method in ("linear", "dynamic", "ntk", "yarn", "longrope")] == [16, 16, 48, 48, 48]
    assert scaled("linear")[1].scaling == LinearScaling(3.0)
    assert scaled("dynamic")[1].scaling == DynamicScaling(3.0)
    assert scaled("yarn")[1].scaling == YarnScaling(3.0, TRAINED)
    ntk = scaled("ntk")[1]
    assert ntk.scaling is None and ntk.theta == pytest.approx(10000.0 * 3 ** (12 / 10))
    assert scaled("longrope")[1].scaling == LongRopeScaling(
        tuple(LONGROPE["short_factor"]), tuple(LONGROPE["long_factor"]), TRAINED, 3.0
    )
    assert all(
        scaled(method)[1].context_length == LENGTH for method in ("linear", "dynamic", "ntk", "yarn", "longrope")
    )


def test_up_to_the_trained_length_nothing_is_scaled(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    config = read_config_values(tiny_values("llama-2"))
    plain = replace(config.ropes[0], max_position_embeddings=TRAINED)
    for method in ("linear", "ntk", "dynamic", "yarn"):
        for length in (TRAINED, 5):
            assert with_long_context(config, section(method), length).ropes == (plain,)


def test_a_stage_is_rotated_as_a_model_of_its_length(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    values = tiny_values("llama-2")
    stages = [
        LengthStage(length=TRAINED, steps=1),
        LengthStage(length=32, steps=1),
        LengthStage(length=LENGTH, steps=1),
    ]
    for method in ("none", "yarn", "ntk", "linear"):
        staged = section(method, stages=stages)
        model = decoder(values, staged)
        model.staged_ropes = ropes_by_length(read_config_values(values), staged)
        assert list(model.staged_ropes) == [TRAINED, 32, LENGTH]
        tokens = tokens_of(TRAINED)
        for length in (TRAINED, 32, LENGTH):
            own = build(with_long_context(read_config_values(values), section(method), length))
            own.load_state_dict(model.state_dict())
            found = logits(model, tokens, stage_length=length)
            assert torch.equal(found, logits(own, tokens))
            assert torch.equal(found, logits(model, tokens)) == (length == LENGTH or method == "none")


def test_only_layers_that_see_all_are_scaled_where_layers_may_differ(
    tiny_values: Callable[[str], dict[str, Any]],
) -> None:
    plain = read_config_values(tiny_values("gemma3") | {"rope_scaling": None})
    config = with_long_context(plain, section("yarn"), LENGTH)
    for before, after in zip(plain.layers, config.layers, strict=True):
        is_full = after.mixer.window is None
        assert after.mixer.rope is not None and before.mixer.rope is not None
        assert (after.mixer.rope.scaling == YarnScaling(3.0, TRAINED)) == is_full
        assert after.mixer.rope.theta == before.mixer.rope.theta
    everywhere = with_long_context(read_config_values(tiny_values("mistral")), section("yarn"), LENGTH)
    assert everywhere.ropes[0].scaling == YarnScaling(3.0, TRAINED)


def test_a_model_that_is_scaled_already_goes_on_from_its_own_length(
    tiny_values: Callable[[str], dict[str, Any]],
) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
    config = read_config_values(tiny_values("llama-2") | {"rope_scaling": yarn})
    assert original_length(config, "yarn") == 32
    scaled = with_long_context(config, LongContext(method="yarn"), 128)
    assert scaled.ropes[0].scaling == YarnScaling(4.0, 32, beta_fast=16.0)
    assert scaled.max_position_embeddings == 128
    with pytest.raises(ModelError, match=r"method: ntk, but the model's rotary embedding is scaled already \(yarn\)"):
        with_long_context(config, LongContext(method="ntk"), 128)


def test_an_attention_factor_follows_the_stretch_that_it_is_made_of(
    tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """OLMo 3's folders say 0.1 ln 8 + 1 for a factor of 8; stretched further, the model has that of the new factor."""
    from transformers import AutoModelForCausalLM

    own = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": TRAINED, "attention_factor": 1.5}
    values = tiny_values("olmo3") | {"rope_scaling": own}
    model = decoder(values, LongContext(method="yarn"))  # for LENGTH, three times TRAINED
    (scaled,) = [rope.scaling for rope in model.config.ropes if rope.scaling is not None]
    assert scaled == YarnScaling(3.0, TRAINED) and scaled.attention_scaling == pytest.approx(1 + 0.1 * math.log(3))
    save(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = tokens_of(LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(logits(model, tokens), theirs(tokens[None]).logits[0], atol=1e-5, rtol=0)
    # Up to the length that the factor was given for it stays.
    same = with_long_context(read_config_values(values), LongContext(method="yarn"), 2 * TRAINED)
    assert [rope.scaling for rope in same.ropes if rope.scaling] == [YarnScaling(2.0, TRAINED, attention_factor=1.5)]


def test_a_temperature_of_queries_has_the_length_that_the_model_is_stretched_from(
    tiny_values: Callable[[str], dict[str, Any]],
) -> None:
    """Ministral 3 has one key for both, so that a config with two lengths could not be written."""
    config = read_config_values(tiny_values("ministral3"))
    scaled = with_long_context(config, LongContext(method="yarn", original_length=12), LENGTH)
    rope = scaled.ropes[0]
    assert rope.temperature is not None and rope.temperature.length == 12
    assert read_config_values(config_values(scaled, torch_dtype="float32")) == scaled


def test_factors_are_one_for_each_pair(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    config = read_config_values(tiny_values("llama-2"))
    with pytest.raises(ModelError, match=r"long_factor: 5 factors, and the model's 12 rotated .* are 6 pairs: give 6"):
        with_long_context(config, LongContext(method="longrope", long_factor=[1.0] * 5), LENGTH)


def test_what_the_family_could_not_write_is_refused(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    phi3 = read_config_values(tiny_values("phi-4"))
    with pytest.raises(ModelError, match=r"yarn is nothing that a phi3 config.json could say. Use none, ntk, longrope"):
        with_long_context(phi3, section("yarn"), LENGTH)
    for method in ("ntk", "longrope"):
        with_long_context(phi3, section(method), LENGTH)


@pytest.mark.parametrize("case", ["qwen3", "gemma3", "olmo3", "smollm3", "phi-4", "mistral", "gemma2"])
@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "longrope"])
def test_every_family_can_say_what_its_model_computes(
    case: str, method: str, tiny_values: Callable[[str], dict[str, Any]]
) -> None:
    config = read_config_values(tiny_values(case) | {"rope_scaling": None, "rope_parameters": None})
    pairs = next(layer.mixer.rope.dim // 2 for layer in config.layers if layer.mixer.rope is not None)
    factors = {"long_factor": [2.0] * pairs} if method == "longrope" else {}
    scaled = LongContext(method=method, original_length=TRAINED, **factors)  # type: ignore[arg-type]
    if (method == "longrope" and case in ("gemma3", "olmo3")) or (
        method not in ("ntk", "longrope") and case == "phi-4"
    ):
        with pytest.raises(ModelError, match="config.json could say"):
            with_long_context(config, scaled, LENGTH)
        return
    config = with_long_context(config, scaled, LENGTH)
    assert read_config_values(config_values(config, torch_dtype="float32")) == config


def test_latent_and_linear_attention_are_scaled_where_they_are_rotated(
    tiny_values: Callable[[str], dict[str, Any]],
) -> None:
    stages = [LengthStage(length=32, steps=1), LengthStage(length=LENGTH, steps=1)]
    for case in ("deepseek-v3", "qwen3-next"):
        values = tiny_values(case) | {"rope_scaling": None, "rope_parameters": None}
        config = read_config_values(values)
        for before, after in zip(config.layers, with_long_context(config, section("yarn"), LENGTH).layers, strict=True):
            rope = after.mixer.rope
            assert (rope is None) == (before.mixer.rope is None)
            assert rope is None or rope.scaling == YarnScaling(3.0, TRAINED)
        assert list(ropes_by_length(config, section("yarn", stages=stages))) == [32, LENGTH]
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale": 1.0}
    values["rope_scaling"] = {**yarn, "mscale_all_dim": 1.0}
    deepseek = read_config_values(tiny_values("deepseek-v3") | {"rope_scaling": values["rope_scaling"]})
    assert with_long_context(deepseek, section("yarn"), LENGTH).layers[0].mixer.attention_scale > (
        deepseek.layers[0].mixer.attention_scale
    )
    with pytest.raises(ModelError, match="at 32 tokens the model's mscale_all_dim would scale scores in another way"):
        ropes_by_length(deepseek, section("yarn", stages=stages))
