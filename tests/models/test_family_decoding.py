"""Every family decodes in the embedded engine what its model says without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.generation import generate
from builders.rollout_requests import GREEDY, PROMPTS, requests, slowly

from danlu.inference.engine import EngineOptions
from danlu.models.decoder import Decoder
from danlu.models.hf_config import read_config_values
from danlu.models.loading import build
from danlu.models.shared_keys import ReadingAttention

LENGTH = 16


def decoder_of(values: dict[str, Any]) -> Decoder:
    """Weights are large enough that greedy text varies."""
    model = build(read_config_values(values))
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * (0.3 if "norm" in name else 0.15))
            if name.endswith("norm.weight"):
                parameter.add_(1.0 - model.config.norm_offset)
            if name.endswith("layer_scalar.weight"):
                parameter.add_(1.0)
    return model.requires_grad_(False)


@pytest.mark.slow
def test_a_cache_changes_no_answer(family_values: dict[str, Any]) -> None:
    """Two prompts of different lengths in blocks of 4 tokens: windows end inside of a block."""
    model, prompts = decoder_of(family_values), PROMPTS[::3]
    answers = generate(model, prompts, GREEDY, LENGTH, options=EngineOptions(block=4))
    for answer, request in zip(answers, requests(count=LENGTH, prompts=prompts), strict=True):
        tokens, logprobs = slowly(model, request, guess=answer.tokens)
        assert list(answer.tokens) == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_norms_behind_the_rotation_take_part_in_decoding(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    """The fused decoder of plain models must not take it; the control has norms before the rotation."""
    model = decoder_of(tiny_values("hunyuan"))
    (answer,) = generate(model, PROMPTS[:1], GREEDY, 6)
    _, logprobs = slowly(model, requests(count=6)[0])
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
    for layer in model.layers.values():
        layer.attention.norms_rotated = False
    (other,) = generate(model, PROMPTS[:1], GREEDY, 6)
    assert other.logprobs != pytest.approx(logprobs, abs=1e-2)


@pytest.mark.parametrize("exact", [False, True])
def test_layers_without_keys_read_the_cache_of_the_layer_that_gives_them(
    exact: bool, tiny_values: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, chunks of them and single tokens; the control reads the cache of another layer."""
    model = decoder_of(tiny_values("gemma4-e2b"))
    assert [bool(layer.attention.cache.shapes) for layer in model.layers.values()] == [True] * 4 + [False] * 4
    options = EngineOptions(block=4, batch_tokens=12, exact=exact)
    prompts = (tuple(range(5, 29)), PROMPTS[0])
    answers = generate(model, prompts, GREEDY, 8, options=options)
    for answer, request in zip(answers, requests(count=8, prompts=prompts), strict=True):
        tokens, logprobs = slowly(model, request)
        assert list(answer.tokens) == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
    mix = ReadingAttention._mix
    monkeypatch.setattr(
        ReadingAttention, "_mix", lambda own, attend, q, keys: mix(own, attend, q, replace(keys, layer=keys.layer - 2))
    )
    (other, _) = generate(model, prompts, GREEDY, 8, options=options)
    assert other.logprobs != pytest.approx(answers[0].logprobs, abs=1e-2)
