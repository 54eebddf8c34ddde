"""Every family decodes in the embedded engine what its model says without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.generation import generate
from builders.rollout_requests import GREEDY, PROMPTS, requests, slowly

from danlu.inference.engine import EngineOptions
from danlu.models.decoder import Decoder
from danlu.models.hf_config import read_config_values
from danlu.models.loading import build

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
