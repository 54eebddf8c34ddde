"""torch's compiler has the gradients that the written-out model has."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from builders.covering import fast
from builders.small_experts import QWEN2_MOE, small_decoder
from torch import Tensor

from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.presets import from_scratch
from danlu.recipe.sections import Model


def gradients(model: Decoder, compiled: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 60, (24,), generator=generator)
    positions = torch.cat((torch.arange(10), torch.arange(14)))
    forward = model.compiled() if compiled else model
    hidden = forward(tokens, positions, PackedAttention((0, 10, 24)), dtype)
    (hidden.float() * torch.randn(hidden.shape, generator=generator)).sum().backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", fast(["llama", "gemma2", "qwen3"], "gemma2"))  # it has most of what is traced
def test_what_is_traced_has_the_same_gradients(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, and run as it is: torch 2.11 made gradients zero there, without a word."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": family, "num_key_value_heads": 2, "head_dim": 8, **sizes}
    model = build(from_scratch(Model(config=config, tokenizer="none"), 60, 1, 2))
    initialize(model, 0)
    _compare(model, dtype)


def test_experts_stay_uncompiled_and_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    _compare(small_decoder(QWEN2_MOE), torch.float32)


def _compare(model: Decoder, dtype: torch.dtype) -> None:
    written, traced = gradients(model, False, dtype), gradients(model, True, dtype)
    assert written.keys() == traced.keys() and len(written) > 15
    for name, gradient in written.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(traced[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()))
