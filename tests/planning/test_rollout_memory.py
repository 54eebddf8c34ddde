"""The memory of an engine that answers, against the tensors that it has then."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.small_config import small_config

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.pool import CachePool
from danlu.inference.request import Request, SamplingOptions
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.packed_weights import can_pack
from danlu.numerics import encoded_products
from danlu.planning.cache_memory import DECODE_ROOM
from danlu.planning.rollout_lengths import AskedPrompt
from danlu.planning.rollout_memory import EngineBytes, engine_bytes
from danlu.planning.rollout_seconds import EngineModel

CONFIG = small_config(tie_word_embeddings=True)
PROMPTS = [AskedPrompt(20, (9, 9, 9)), AskedPrompt(12, (9, 9))]


def engine_of(config: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> EmbeddedEngine:
    """An engine that is about to draw the last tokens of `PROMPTS`."""
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else torch.nn.init.normal_(parameter, std=0.02)
    engine = EmbeddedEngine(model.requires_grad_(False), options, dtype=dtype)
    for number, prompt in enumerate(PROMPTS):
        text = [(number + 3 * place) % config.vocab_size for place in range(prompt.tokens)]
        engine.submit(Request(number, text, SamplingOptions(seed=1), 9, len(prompt.answers)))
    for _ in range(8):
        engine.step()
    assert engine.unfinished == 5
    return engine


def planned(config: ModelConfig, options: EngineOptions, precision: Any, *, is_cast: bool) -> EngineBytes:
    model = EngineModel(config, precision)
    return engine_bytes(model, options.bounds, PROMPTS, packed_gib=options.packed_gib, is_cast=is_cast)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_copies_and_buffers_are_those_of_the_engine(precision: str, dtype: torch.dtype) -> None:
    options = EngineOptions(block=4)
    of_plan = planned(CONFIG, options, precision, is_cast=precision != "fp32")
    runner = engine_of(CONFIG, dtype, replace(options, cache_gib=of_plan.cache / 2**30))._runner
    pool = runner.pool
    assert isinstance(pool, CachePool)
    assert sum(view.nbytes for layer in range(2) for view in pool.tensors(layer)) == of_plan.cache
    buffers = sum(each.nbytes for each in pool.decode_buffers._storage.values())
    step = 4 * 5 * pool.token_bytes  # a block of each answer
    assert 0 < of_plan.buffers - step <= buffers <= of_plan.buffers
    assert buffers == 5 * (20 + 1 + DECODE_ROOM + 3) // 4 * 4 * pool.token_bytes
    if precision == "fp32" and not can_pack(dtype, torch.device("cpu")):
        return  # torch without oneDNN makes none
    numbers = [math.prod(weight.shape) for key in runner.packed_weights._copies.values() for weight in key.weights]
    assert sum(numbers) * dtype.itemsize == of_plan.copies


def test_copies_that_only_have_another_order_have_a_limit() -> None:
    options = EngineOptions(block=4, packed_gib=1000 / 2**30)
    assert planned(CONFIG, options, "fp32", is_cast=False).copies == 1000
    assert planned(CONFIG, options, "bf16", is_cast=True).copies > 1000
    exact = engine_bytes(EngineModel(CONFIG, "fp32", exact=True), options.bounds, PROMPTS, packed_gib=2.0)
    assert exact.copies == 0


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_encoded_copies_are_those_of_the_engine(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_products, "_has_integer_products", lambda: False)
    options = EngineOptions(block=4, precision=precision, packed_gib=0)
    model = EngineModel(CONFIG, "fp32", "cpu")
    of_plan = engine_bytes(model, options.bounds, PROMPTS, packed_gib=0, precision=precision)
    runner = engine_of(CONFIG, torch.float32, replace(options, cache_gib=of_plan.cache / 2**30))._runner
    encoded = [each for each in runner.packed_weights._copies.values() if each.encoder is not None]
    assert sum(4 * weight.numel() for each in encoded for weight in each.weights) == of_plan.copies > 0
    assert engine_bytes(model, options.bounds, PROMPTS, packed_gib=0).copies == 0
    on_card = replace(model, device="cuda")
    assert engine_bytes(on_card, options.bounds, PROMPTS, precision=precision).copies == of_plan.copies // 4
