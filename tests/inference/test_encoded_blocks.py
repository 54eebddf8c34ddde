"""Caches of 8-bit codes against attention in float64 over numbers that are rounded as the formats define it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from builders.reference_attention import ReferenceAttention
from builders.rollout_requests import GREEDY, PROMPTS, cache_of, requests, slowly
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.core.layer_types import Keys, LayerCache
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan
from danlu.planning.cache_memory import CacheKind, block_bytes

TILE = 128
KINDS: tuple[CacheKind, ...] = ("fp8", "int8")
VALUES = {
    "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double(),
    "int8": torch.arange(-127, 128).double(),
}


def rounded(entries: Tensor, kind: str, tile: int = TILE) -> Tensor:
    """Returns the nearest numbers, of all there are, in float64; a scale for each tile of a token's head."""
    parts = []
    for part in entries.double().split(tile, dim=-1):
        largest = part.abs().amax(-1, keepdim=True).float()
        scale = largest.where(largest != 0, 1) / (448.0 if kind == "fp8" else 127)
        values = VALUES[kind][VALUES[kind].isfinite()]
        steps = part.float() / scale  # which a format computes in float32
        nearest = (steps.double().unsqueeze(-1) - values).abs().argmin(-1)
        parts.append((values[nearest].float() * scale).double())
    return torch.cat(parts, dim=-1)


class RoundedAttention(ReferenceAttention):
    """Attention over rounded entries of all tokens."""

    def __init__(self, boundaries: tuple[int, ...], kind: str, wrong: bool = False) -> None:
        super().__init__(boundaries)
        self.kind, self.wrong, self.own = kind, wrong, dict[int, tuple[Tensor, ...]]()

    def __call__(self, layer: int, q: Tensor, keys: Keys, **settings: Any) -> Tensor:
        if keys.layer is None:
            self.own[layer] = tuple(rounded(x, self.kind) for x in keys.stored)
            if self.wrong:  # the scale of the token before
                scales = [x.abs().amax(-1, keepdim=True) for x in self.own[layer]]
                pairs = zip(self.own[layer], scales, strict=True)
                self.own[layer] = tuple(x / scale * scale.roll(1, 0) for x, scale in pairs)
        keys = dataclasses.replace(keys, stored=self.own[layer if keys.layer is None else keys.layer])
        return super().__call__(layer, q, keys, **settings)


def pool_of(kind: CacheKind, layers: list[LayerCache], blocks: int = 3, **settings: Any) -> CachePool:
    return CachePool(
        layers, blocks=blocks, block=4, dtype=torch.float64, device=torch.device("cpu"), cache=kind, **settings
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_formula_and_a_read_is_what_was_rounded(kind: CacheKind) -> None:
    layers = [LayerCache(((2, 8), (2, 6)), None), LayerCache(((1, 576),), None), LayerCache(((2, 8), (2, 6)), 3)]
    pool = pool_of(kind, layers)
    stored = sum(x.nbytes for parts in pool._storage.values() for x in parts)
    assert stored == 3 * block_bytes(layers, 4, 8, cache=kind) < 3 * block_bytes(layers, 4, 2)
    per_token = 2 * (2 * (8 + 4) + 2 * (6 + 4)) + 576 + 5 * 4
    assert stored == 3 * 4 * per_token
    pool.carry_out(Plan(chunks=(Chunk(0, 0, 7, (2, 0), 7),)))
    generator = torch.Generator().manual_seed(0)
    for layer, cache in enumerate(layers):
        entries = [torch.randn(7, *shape, generator=generator, dtype=torch.float64).exp() for shape in cache.shapes]
        read = pool.write(layer, *entries)
        assert all(torch.equal(x, rounded(y, kind)) for x, y in zip(read, entries, strict=True))
        gathered = pool.gather(layer, torch.tensor([2, 0]), 7)
        assert all(torch.equal(x, y) for x, y in zip(gathered, read, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(pool.rounded(layer, *entries), read, strict=True))
        if layer == 1:  # control: one scale for all of an entry
            assert not torch.equal(read[0], rounded(entries[0], kind, tile=576))
    entries[0][0] = torch.nan
    assert pool.write(2, *entries)[0][0].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["llama", "window", "softcap", "sinks", "latent", "key-reuse"])
def test_the_engine_attends_to_the_decoded_cache(small_decoder: Any, attention: str, kind: CacheKind) -> None:
    model, asked = small_decoder(attention).double(), requests(GREEDY, 10)
    options = EngineOptions(block=4, cache=kind, batch_tokens=6)  # prompts in chunks
    completions = EmbeddedEngine(model, options).generate(asked)
    attend = partial(RoundedAttention, kind=kind)
    for request, completion in zip(asked, completions, strict=True):
        tokens, logprobs = slowly(model, request, guess=completion.tokens, attention=attend)
        assert completion.tokens == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=2e-5)
    wrong = partial(attend, wrong=True)
    controls = {"the cache as it is": slowly(model, request, guess=tokens), "another token's scale": slowly(
        model, request, guess=tokens, attention=wrong
    )}  # fmt: skip
    for other, control in controls.values():
        assert other != tokens or control != pytest.approx(logprobs, abs=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "neighbours in one pass": {},
    "no sharing": {"prefix_sharing": False},
    "preempted": {"blocks": 9},
    "swapped": {"blocks": 9, "preempt": "swap"},
    "drafts": {"draft": DraftOptions(tokens=3)},
    "small passes": {"batch_tokens": 5},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("attention", ["llama", pytest.param("window", marks=pytest.mark.slow)])
def test_no_setting_of_the_engine_changes_an_answer(small_decoder: Any, name: str, attention: str) -> None:
    model, settings = small_decoder(attention).double(), dict(SETTINGS[name])
    asked = requests(GREEDY, 8, prompts=(*PROMPTS, tuple(range(3, 20))), samples=2)
    blocks = settings.pop("blocks", 200)
    tight = cache_of(model, blocks, 4, **settings)
    size = tight.cache_gib * block_bytes([each.attention.cache for each in model.layers.values()], 4, 8, cache="int8")
    size /= block_bytes([each.attention.cache for each in model.layers.values()], 4, 4)
    engine = EmbeddedEngine(model, dataclasses.replace(tight, cache="int8", cache_gib=size))
    completions = engine.generate(asked)
    if blocks < 200:
        assert engine.statistics.preemptions > 0
    alone = [EmbeddedEngine(model, EngineOptions(block=4, cache="int8")).generate([each]) for each in asked]
    for own, other in zip(completions, (each for several in alone for each in several), strict=True):
        assert own.tokens == other.tokens
        assert own.logprobs == pytest.approx(other.logprobs, abs=2e-5)


def test_updates_and_sleep_leave_nothing_of_the_cache(small_decoder: Any) -> None:
    model, other = small_decoder("llama").double(), small_decoder("llama", seed=1).double()
    engine = EmbeddedEngine(model, EngineOptions(block=4, cache="fp8"))
    (before,) = engine.generate(requests(count=10)[:1])
    engine.sleep()
    engine.wake()
    engine.update(1, other.named_parameters())
    (after,) = engine.generate(requests(count=10)[:1])
    (fresh,) = EmbeddedEngine(other, EngineOptions(block=4, cache="fp8")).generate(requests(count=10)[:1])
    assert after.tokens == fresh.tokens != before.tokens
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=2e-5)


def test_exact_numerics_are_refused(small_decoder: Any) -> None:
    with pytest.raises(ModelError, match=r"rollout\.cache: int8 rounds"):
        EmbeddedEngine(small_decoder("llama"), EngineOptions(exact=True, cache="int8"))


@pytest.mark.parametrize("attention", ["llama", "qk-norm"])
def test_the_fused_decoder_rounds_as_the_modules_do(small_decoder: Any, attention: str) -> None:
    model, asked = small_decoder(attention), requests(GREEDY, 12, samples=3)
    engine = EmbeddedEngine(model, EngineOptions(block=4, cache="fp8"))
    fused = engine.generate(asked)
    assert engine._runner._fused is not None
    by_modules = EmbeddedEngine(model, EngineOptions(block=4, cache="fp8"))
    by_modules.copies_weights = False
    for own, other in zip(fused, by_modules.generate(asked), strict=True):
        assert own.tokens == other.tokens
        # A number next to the border of two codes may be rounded the other way.
        assert own.logprobs == pytest.approx(other.logprobs, abs=2e-2)
