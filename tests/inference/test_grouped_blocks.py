"""Caches of 4 bits against attention in float64 over numbers that are rounded as the format defines it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from builders.reference_attention import ReferenceAttention, masked_attention
from builders.rollout_requests import GREEDY, requests, slowly
from torch import Tensor

from danlu.core.errors import ModelError, ResourceError
from danlu.core.layer_types import Keys, LayerCache
from danlu.inference import grouped_attention, grouped_blocks, model_runner
from danlu.inference.decode_buffers import DecodeRows
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan
from danlu.planning.cache_memory import GIB, CacheSizes, EngineBounds, PoolSize, block_bytes, newest_tokens

BLOCK, GROUP = 4, 32
OPTIONS = EngineOptions(block=BLOCK, cache="int4")
LONG = (tuple(range(3, 20)), (3, 9, 4), (7,))


def rounded(entries: Tensor, tokens: int, channels: int) -> Tensor:
    """Returns entries [B, *lead, C] in 4 bits, float64; so many tokens and channels share a scale and a zero."""
    out = torch.empty_like(entries, dtype=torch.float64)
    for own, x in zip(out.split(tokens), entries.double().split(tokens), strict=True):
        for part, y in zip(own.split(channels, dim=-1), x.split(channels, dim=-1), strict=True):
            of_group = {"dim": (0, -1), "keepdim": True}
            least, greatest = y.float().amin(**of_group), y.float().amax(**of_group)
            scale = torch.maximum((greatest - least) / 15, torch.maximum(greatest, -least) / 32000)
            scale = scale.where(scale != 0, 1).bfloat16().float()
            zero = (-least / scale).round()
            codes = (y.float() / scale + zero).round().clamp(0, 15)
            part.copy_(((codes - zero) * scale).double())
    return out


class InBlocks(ReferenceAttention):
    """Attention over rounded entries of earlier blocks, and over those of the query's own block as they are."""

    def __init__(self, boundaries: tuple[int, ...], wrong: str = "") -> None:
        super().__init__(boundaries)
        self.wrong, self.own = wrong, dict[int, tuple[Tensor, ...]]()

    def _rounded(self, number: int, entries: Tensor) -> Tensor:
        if self.wrong == "the next block's scales":
            entries = entries.roll(-1, 0)
        by_channel = (number == 0) != (self.wrong == "the other axis")
        sizes = (GROUP, 1) if by_channel else (1, GROUP)
        both = torch.cat([rounded(block, *sizes) for block in entries.split(BLOCK)])
        return both.roll(1, 0) if self.wrong == "the next block's scales" else both

    def __call__(
        self, layer: int, q: Tensor, keys: Keys, *, window: int | None, sinks: Tensor | None = None, **settings: Any
    ) -> Tensor:
        if keys.layer is None:
            self.own[layer] = tuple(self._rounded(*each) for each in enumerate(keys.stored))
        seen = dataclasses.replace(keys, stored=self.own[layer if keys.layer is None else keys.layer])
        pairs = zip(seen.expanded(), keys.expanded(), strict=True)
        k, v = (torch.cat((before, own)) for before, own in pairs)
        blocks = torch.arange(len(q)) // BLOCK
        is_own = blocks[:, None] == blocks
        if self.wrong == "no newest tokens":
            is_own = torch.zeros_like(is_own)
        mask = self.mask(window, q.device)
        both = torch.cat((mask & ~is_own, mask & is_own), dim=1)
        return masked_attention(q, k, v, both, sinks=sinks, **settings)


def test_bytes_are_those_of_the_formula_and_full_blocks_are_what_was_rounded() -> None:
    layers = [LayerCache(((2, 8), (2, 7)), None), LayerCache(((1, 70),), None), LayerCache(((2, 8), (2, 7)), 3)]
    pool = CachePool(
        layers, blocks=3, block=BLOCK, dtype=torch.float64, device=torch.device("cpu"), cache="int4", slots=2,
        newest=newest_tokens(BLOCK, 2),
    )  # fmt: skip
    heads = 2 * (2 * (BLOCK * 4 + 4 * 8) + 2 * (BLOCK * 4 + 4 * BLOCK))  # two layers: keys and values of two heads
    of_block = heads + BLOCK * 35 + 4 * 70
    stored = sum(x.nbytes for parts in pool._storage.values() for x in parts)
    assert stored == 3 * of_block == 3 * block_bytes(layers, BLOCK, 8, cache="int4")
    bounds = EngineBounds(2, 8, BLOCK, 1.0, cache="int4", drafts=2)
    sizes = CacheSizes.of(layers, BLOCK, 8, cache="int4", drafts=2)
    newest = sum(x.nbytes for x in pool._newest.values())
    assert newest == 2 * sizes.newest_bytes == 2 * (BLOCK + 2) * 8 * (2 * 2 * 15 + 70)
    size = PoolSize.of(sizes, dataclasses.replace(bounds, cache_gib=(2 * newest + 0.5) / GIB), 400)
    assert (size.slots, size.blocks) == (2, newest // of_block) and size.bytes_of(sizes) <= 2 * newest
    with pytest.raises(ResourceError, match="next to the newest tokens of a sequence"):
        PoolSize.of(sizes, dataclasses.replace(bounds, cache_gib=0.52 * newest / GIB), 400)

    generator = torch.Generator().manual_seed(0)
    for layer, cache in enumerate(layers):
        # All of a channel on one side of 0, far from it: what keys are.
        entries = [
            torch.randn(7, *shape, generator=generator, dtype=torch.float64) + 40 * torch.arange(shape[-1]).cos()
            for shape in cache.shapes
        ]
        for start, stop in ((0, 3), (3, 7)):
            pool.carry_out(Plan(chunks=(Chunk(0, start, stop, (2, 0), 7, slot=1),)))
            pool.write(layer, *(x[start:stop] for x in entries))
        gathered = pool.gather(layer, torch.tensor([2]), BLOCK)
        for number, (x, y) in enumerate(zip(gathered, entries, strict=True)):
            sizes_of_groups = ((GROUP, 1), (1, GROUP))[number]
            assert torch.equal(x, rounded(y[:BLOCK], *sizes_of_groups))
            assert not torch.equal(x, rounded(y[:BLOCK], *sizes_of_groups[::-1]))  # control: the other axis
            assert (x - y[:BLOCK]).abs().max() < ((5, 45)[number] if layer != 1 else 5) / 15
    entries[0][1] = torch.nan
    pool.carry_out(Plan(chunks=(Chunk(0, 0, 4, (2, 0), 7, slot=1),)))
    pool.write(2, *(x[:4] for x in entries))
    assert pool.gather(2, torch.tensor([2]), BLOCK)[0].isnan().all()


WRONG = ("no newest tokens", "the other axis", "the next block's scales")
REST = [pytest.param(name, marks=pytest.mark.slow) for name in ("window", "latent", "softcap", "sinks", "key-reuse")]


@pytest.mark.parametrize("attention", ["llama", *REST])
def test_the_engine_sees_its_own_block_as_it_is_and_those_before_in_4_bits(
    small_decoder: Any, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """Products of queries end within blocks, and chunks are read in several parts."""
    model, asked = small_decoder(attention).double(), requests(GREEDY, 10, prompts=LONG)
    monkeypatch.setattr(grouped_attention, "PRODUCT_ROWS", 6)
    monkeypatch.setattr(grouped_attention, "READ_TOKENS", 18)
    completions = EmbeddedEngine(model, dataclasses.replace(OPTIONS, batch_tokens=18)).generate(asked)
    monkeypatch.undo()
    assert not differ(EmbeddedEngine(model, dataclasses.replace(OPTIONS, batch_tokens=11)).generate(asked), completions)
    for request, completion in zip(asked, completions, strict=True):
        tokens, logprobs = slowly(model, request, guess=completion.tokens, attention=InBlocks)
        assert completion.tokens == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=2e-5)
        if request.number == 0:
            for wrong in WRONG:
                attend = partial(InBlocks, wrong=wrong)
                other, control = slowly(model, request, guess=tokens, attention=attend)
                assert other != tokens or control != pytest.approx(logprobs, abs=1e-4), wrong


def test_chunks_that_are_read_together_see_what_each_sees_alone() -> None:
    """They begin within blocks, and one has no decoded block before it."""
    layers = [LayerCache(((2, 8), (2, 8)), None)]
    generator = torch.Generator().manual_seed(0)
    entries = [[torch.randn(40, heads, 8, generator=generator).double() for heads in (4, 2, 2)] for _ in range(3)]
    parts = ((6, 19), (1, 12), (9, 30))
    blocks = [tuple(range(8 * number, 8 * number + 8)) for number in range(3)]

    def attended(together: bool) -> torch.Tensor:
        pool = CachePool(
            layers, blocks=24, block=BLOCK, dtype=torch.float64, device=torch.device("cpu"), cache="int4", slots=3,
            newest=BLOCK,
        )  # fmt: skip
        outputs = []

        def run(numbers: tuple[int, ...], *, first: bool) -> None:
            ranges = [(0, parts[number][0]) if first else parts[number] for number in numbers]
            pairs = list(zip(numbers, ranges, strict=True))
            plan = Plan(chunks=tuple(Chunk(n, start, stop, blocks[n], stop, slot=n) for n, (start, stop) in pairs))
            pool.carry_out(plan)
            q, k, v = (torch.cat([entries[n][at][start:stop] for n, (start, stop) in pairs]) for at in range(3))
            outputs.append(pool.attend(plan)(0, q, Keys((k, v)), scale=0.3, window=11, softcap=None))

        for first in (True, False):
            for numbers in ((0, 1, 2),) if together else ((0,), (1,), (2,)):
                run(numbers, first=first)
        return torch.cat(outputs)

    alone = attended(together=False)
    assert (attended(together=True) - alone).abs().max() < 1e-12 < alone.abs().max()


SETTINGS: dict[str, dict[str, Any]] = {
    "neighbours in one pass": {},
    "no sharing": {"prefix_sharing": False},
    "preempted": {},
    "swapped": {"preempt": "swap"},
    "drafts": {"draft": DraftOptions(tokens=6)},
    "draft model": {"draft": DraftOptions("model", tokens=3)},
    "small passes": {"batch_tokens": 5},
    "few slots": {"sequences": 2},
}


ATTENTIONS = "llama", "window", "latent"


def answers(small_decoder: Any, name: str, attention: str = "llama") -> tuple[list[Any], list[Any]]:
    """The completions of several requests together, and of each alone with no other setting."""
    model, is_tight = small_decoder(attention).double(), name in ("preempted", "swapped")
    prompts = (LONG[0], LONG[0], LONG[1]) if is_tight else (*LONG, LONG[0], LONG[0][:9] * 2)
    asked = requests(GREEDY, 24 if is_tight else 9, prompts=prompts, samples=2)
    sizes = CacheSizes.of([each.attention.cache for each in model.layers.values()], BLOCK, 8, cache="int4")
    cache_gib = 4 * sizes.slot_bytes / GIB if is_tight else 0.01  # two slots, and as much for blocks
    options = dataclasses.replace(OPTIONS, cache_gib=cache_gib, **SETTINGS[name])
    draft_model = small_decoder(attention, seed=1).double() if name == "draft model" else None
    engine = EmbeddedEngine(model, options, draft_model=draft_model)
    completions = engine.generate(asked)
    statistics = engine.statistics
    assert (statistics.preemptions > 0) == is_tight and (statistics.swaps > 0) == (name == "swapped")
    assert "draft" not in name or statistics.drafts_accepted < statistics.drafts_proposed
    alone = [EmbeddedEngine(model, OPTIONS).generate([each]) for each in asked]
    return completions, [each for several in alone for each in several]


def differ(completions: list[Any], others: list[Any]) -> bool:
    """Whether an answer is another than it should be."""
    pairs = zip(completions, others, strict=True)
    return any(
        own.tokens != other.tokens or own.logprobs != pytest.approx(other.logprobs, abs=2e-5) for own, other in pairs
    )


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("drafts", "llama"),
        *(pytest.param(name, attention, marks=pytest.mark.slow) for name in SETTINGS for attention in ATTENTIONS),
    ],
)
def test_no_setting_of_the_engine_changes_an_answer(small_decoder: Any, name: str, attention: str) -> None:
    assert not differ(*answers(small_decoder, name, attention))


@pytest.mark.slow
def test_one_slot_for_all_or_a_ring_without_room_for_drafts_changes_answers(
    small_decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_plan = grouped_blocks.NewestTokens

    def in_one_slot(chunks: Any, *rest: Any) -> Any:
        return of_plan([chunk._replace(slot=0) for chunk in chunks], *rest)

    with monkeypatch.context() as patch:
        patch.setattr(grouped_blocks, "NewestTokens", in_one_slot)
        assert differ(*answers(small_decoder, "neighbours in one pass"))
    monkeypatch.setattr(model_runner, "newest_tokens", lambda block, drafts: block)
    assert differ(*answers(small_decoder, "drafts"))


@pytest.mark.slow
def test_updates_and_sleep_leave_nothing_of_the_cache(small_decoder: Any) -> None:
    model, other = small_decoder("llama").double(), small_decoder("llama", seed=1).double()
    engine, asked = EmbeddedEngine(model, OPTIONS), requests(GREEDY, 10, prompts=LONG)[:1]
    (before,) = engine.generate(asked)
    engine.sleep()
    engine.wake()
    engine.update(1, other.named_parameters())
    (after,) = engine.generate(asked)
    (fresh,) = EmbeddedEngine(other, OPTIONS).generate(asked)
    assert after.tokens == fresh.tokens != before.tokens
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=2e-5)


def test_exact_numerics_are_refused(small_decoder: Any) -> None:
    with pytest.raises(ModelError, match=r"rollout\.cache: int4 rounds"):
        EmbeddedEngine(small_decoder("llama"), dataclasses.replace(OPTIONS, exact=True))


def test_the_fused_decoder_decodes_blocks_as_they_fill(small_decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of several lengths, in whose buffers a block ends in different passes."""
    prompts = LONG[0], LONG[0][:15], LONG[0][1:15]
    model, asked = small_decoder("llama"), requests(GREEDY, 9, prompts=prompts, samples=2)

    def answered(*, fused: bool) -> tuple[list[list[int]], list[float]]:
        engine = EmbeddedEngine(model, OPTIONS)
        engine.copies_weights = fused
        completions = engine.generate(asked)
        assert (engine._runner._fused is not None) == fused
        return [each.tokens for each in completions], [number for each in completions for number in each.logprobs]

    (own, logprobs), (other, expected) = answered(fused=True), answered(fused=False)
    assert own == other
    # A number next to the border of two codes may be rounded the other way.
    assert logprobs == pytest.approx(expected, abs=5e-2)
    encode_full, compared = DecodeRows._encode_full, [0]

    def encode_and_compare(rows: DecodeRows, buffers: torch.Tensor, pool: Any) -> None:
        """Buffers that are kept from pass to pass equal those that a new gather makes, to the bit."""
        encode_full(rows, buffers, pool)
        gathered = rows._gathered(-1, pool)
        for row, chunk in enumerate(rows._chunks):
            assert torch.equal(buffers[:, row, :, : chunk.start], gathered[:, row, :, : chunk.start])
            compared[0] += chunk.start % OPTIONS.block == 0

    monkeypatch.setattr(DecodeRows, "_encode_full", encode_and_compare)
    assert answered(fused=True)[0] == own and compared[0] > 0
    monkeypatch.setattr(DecodeRows, "_encode_full", lambda *_: None)  # blocks stay as they are
    assert answered(fused=True)[1] != pytest.approx(logprobs, abs=1e-3)
