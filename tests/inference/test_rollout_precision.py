"""Rollouts with encoded weights against a decoder with linear layers that are computed as the formats define them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from builders.rollout_requests import GREEDY, PROMPTS, requests, slowly
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.models.decoder import Decoder
from danlu.models.modules import GroupedLinear, Linear
from danlu.numerics.arithmetic import Fp8Arithmetic

OTHERS = ("lm_head", "router", "shared_gate", "a_proj", "b_proj", "kv_b_proj")
"""Linear layers that keep the type of activations; the last one is multiplied with queries, too."""


class Integers:
    """Products of integers of 64 bits, as a layer's arithmetic."""

    keeps_codes = False
    row_codes = None

    def forward(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(self._product(x, weight) for weight in weights), ()

    def grouped_forward(
        self, x: Tensor, weights: Sequence[Tensor], counts: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        parts = x.split(counts.tolist())
        return tuple(
            torch.cat([self._product(*pair) for pair in zip(parts, each, strict=True)]) for each in weights
        ), ()

    def rows_of_tokens(self, tokens: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        scales, codes = [], []
        for each in (x, weight):
            largest = each.float().abs().amax(1, keepdim=True) if len(each) else each.new_zeros(0, 1).float()
            scales.append((largest / 127).clamp_min(1e-30))
            codes.append((each.float() / scales[-1]).round().long())
        return ((codes[0] @ codes[1].t()).float() * scales[0] * scales[1].t()).to(x.dtype)


def reference(model: Decoder, kind: str) -> Decoder:
    """The model with the products of its layers replaced for passes without the engine."""
    arithmetic: Any = Integers() if kind == "int8" else Fp8Arithmetic("tile")
    for name, module in model.named_modules():
        if isinstance(module, Linear | GroupedLinear) and name.rpartition(".")[2] not in OTHERS:
            module.arithmetic = arithmetic
    return model


def count_close(values: Sequence[float], others: Sequence[float]) -> int:
    return sum(abs(value - other) < 1e-4 for value, other in zip(values, others, strict=True))


@pytest.mark.parametrize(
    ("attention", "kind"),
    [("llama", "int8"), ("llama", "fp8"), ("experts", "int8"), ("latent", "int8")],
)
def test_answers_are_those_of_the_definition(small_decoder: Any, attention: str, kind: Any) -> None:
    model = small_decoder(attention)
    asked = requests(GREEDY, 6, prompts=(*PROMPTS, tuple(range(3, 20))))
    completions = EmbeddedEngine(model, EngineOptions(block=4, precision=kind)).generate(asked)
    without = EmbeddedEngine(model, EngineOptions(block=4)).generate(asked)
    reference(model, kind)
    close = close_without = 0
    for request, completion, usual in zip(asked, completions, without, strict=True):
        tokens, logprobs = slowly(model, request, guess=completion.tokens)
        close += count_close(completion.logprobs, logprobs) if completion.tokens == tokens else 0
        close_without += count_close(usual.logprobs, logprobs)
    # A number at the border of two codes may be rounded the other way, which the rest of its text follows.
    assert close > 0.75 * 6 * len(asked)
    assert close_without < 0.1 * 6 * len(asked)


def test_weights_are_encoded_again_after_an_update(small_decoder: Any) -> None:
    model, other = small_decoder("llama"), small_decoder("llama", seed=1)
    options = EngineOptions(block=4, precision="int8")
    engine = EmbeddedEngine(model, options)
    (before,) = engine.generate(requests(count=10)[:1])
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data = new.data.clone()  # which torch does not count as a change
    (stale,) = engine.generate(requests(count=10)[:1])
    engine.update(1)
    (after,) = engine.generate(requests(count=10)[:1])
    (fresh,) = EmbeddedEngine(other, options).generate(requests(count=10)[:1])
    assert after.tokens == fresh.tokens != before.tokens
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
    assert stale.logprobs != pytest.approx(fresh.logprobs, abs=1e-3), "the control has the codes of before"


def test_drafts_and_fused_decoding_change_no_answer(small_decoder: Any) -> None:
    model, asked = small_decoder("llama"), requests(GREEDY, 12, samples=2)
    plain = EmbeddedEngine(model, EngineOptions(block=4, precision="int8"))
    answers = plain.generate(asked)
    assert plain._runner._fused is not None
    drafted = EmbeddedEngine(model, EngineOptions(block=4, precision="int8", draft=DraftOptions(tokens=3)))
    for own, other in zip(answers, drafted.generate(asked), strict=True):
        assert own.tokens == other.tokens
        assert own.logprobs == pytest.approx(other.logprobs, abs=2e-3)


def test_exact_numerics_are_refused(small_decoder: Any) -> None:
    with pytest.raises(ModelError, match=r"rollout\.precision: int8 rounds"):
        EmbeddedEngine(small_decoder("llama"), EngineOptions(exact=True, precision="int8"))
