"""Attention over cache blocks is that of each sequence by itself, wherever its blocks lie."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from builders.covering import covering
from builders.reference_attention import ReferenceAttention

from danlu.core.layer_types import Keys, LayerCache
from danlu.inference import paged
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan

KINDS = ["llama", "window", "softcap", "qk-norm", "sinks", "latent", "factorized", "key-reuse", "experts"]
BLOCK, BLOCKS = 4, 96
CPU = torch.device("cpu")


GATHERED = [paged.GATHERED_BYTES, 0]


@pytest.fixture(autouse=True, params=GATHERED, ids=["gathered", "by_block"])
def gathered_bytes(request, monkeypatch):
    monkeypatch.setattr(paged, "GATHERED_BYTES", request.param)


class Sequences:
    """Sequences with blocks in a pool, in a random order among NaN; `feed` takes their next tokens."""

    def __init__(self, layers, dtype=torch.float32):
        self.pool = CachePool(layers, blocks=BLOCKS, block=BLOCK, dtype=dtype, device=CPU)
        for layer in range(len(layers)):
            for blocks in self.pool.tensors(layer):
                blocks.fill_(math.nan)
        self.free = list(range(BLOCKS))
        random.Random(5).shuffle(self.free)
        self.tables, self.lengths = {}, {}

    def plan(self, counts):
        """counts: new tokens by sequence."""
        fresh, chunks = [], []
        for sequence, count in counts.items():
            table, start = self.tables.setdefault(sequence, []), self.lengths.get(sequence, 0)
            while len(table) * BLOCK < start + count:
                table.append(self.free.pop())
                fresh.append(table[-1])
            chunks.append(Chunk(sequence, start, start + count, tuple(table), start + count))
            self.lengths[sequence] = start + count
        return Plan(fresh=tuple(fresh), chunks=tuple(chunks))

    def fork(self, sequence, copy):
        """A sequence that begins with the blocks of another; the last one is copied where it is not full."""
        table, length = list(self.tables[sequence]), self.lengths[sequence]
        copies = ()
        if length % BLOCK:
            copies = ((table[-1], self.free[-1]),)
            table[-1] = self.free.pop()
        self.tables[copy], self.lengths[copy] = table, length
        self.pool.carry_out(Plan(copies=copies))

    def drop(self, sequence):
        """Its blocks are free, with NaN in them."""
        table = self.tables.pop(sequence)
        del self.lengths[sequence]
        for layer in range(len(self.pool.layers)):
            for blocks in self.pool.tensors(layer):
                blocks[table] = math.nan
        self.free += table

    def attend(self, counts, spoil=None):
        plan = self.plan(counts)
        self.pool.carry_out(plan)
        return self.pool.attend(plan if spoil is None else spoil(plan))


def caches(model):
    return [layer.attention.cache for layer in model.layers.values()]


def feed(model, sequences, pieces, spoil=None):
    """Logits of each sequence's new tokens, [S, V]."""
    starts = [sequences.lengths.get(sequence, 0) for sequence in pieces]
    counts = {sequence: len(piece) for sequence, piece in pieces.items()}
    positions = [s + i for s, piece in zip(starts, pieces.values(), strict=True) for i in range(len(piece))]
    tokens = torch.tensor([token for piece in pieces.values() for token in piece])
    dtype = sequences.pool.dtype
    with torch.inference_mode():
        hidden = model(tokens, torch.tensor(positions), sequences.attend(counts, spoil), dtype)
        return dict(zip(pieces, model.logits(hidden).split(list(counts.values())), strict=True))


def texts(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]


def full_logits(model, tokens, dtype=torch.float32):
    """Logits [S, V] of one uncached pass with a dense mask."""
    attend = ReferenceAttention((0, len(tokens)))
    return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), attend, dtype))


def assert_same(got, want):
    torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("gathered_bytes", "kind", "split"),
    covering(GATHERED, KINDS, [[27], [1] * 27, [7, 1, 1, 13, 5], [1, 26], [20, 3, 3, 1]]),
    indirect=["gathered_bytes"],
)
def test_one_sequence_in_chunks_equals_one_pass(small_decoder, kind, split):
    model, (tokens,) = small_decoder(kind), texts(27)
    sequences, got, start = Sequences(caches(model)), [], 0
    for size in split:
        got.append(feed(model, sequences, {0: tokens[start : start + size]})[0])
        start += size
    assert_same(torch.cat(got), full_logits(model, tokens))


def ragged_passes(model, sequences, tokens, spoil=None):
    """Prompts, checks of drafts, chunks and single tokens in the same passes; the logits of each sequence."""
    got = {sequence: [] for sequence in range(5)}
    at = dict.fromkeys(got, 0)
    for counts in (
        {0: 10, 1: 3},
        {0: 1, 1: 1, 2: 9, 3: 1},
        {1: 1, 0: 1, 3: 1, 2: 7, 4: 12},
        {4: 1, 3: 1, 2: 1, 1: 1, 0: 1},
        {0: 4, 2: 1, 1: 5, 3: 1, 4: 4},
        *({0: 1, 1: 1, 2: 1, 3: 1, 4: 1} for _ in range(6)),
    ):
        pieces = {sequence: tokens[sequence][at[sequence] : at[sequence] + n] for sequence, n in counts.items()}
        for sequence, logits in feed(model, sequences, pieces, spoil).items():
            got[sequence].append(logits)
            at[sequence] += len(logits)
    return [torch.cat(logits) for logits in got.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_passes_equal_each_sequence_alone(small_decoder, kind):
    model, tokens = small_decoder(kind), texts(*[40] * 5)
    for got, text in zip(ragged_passes(model, Sequences(caches(model)), tokens), tokens, strict=True):
        assert_same(got, full_logits(model, text)[: len(got)])


def test_one_wrong_block_of_a_table_is_seen(small_decoder):
    model, tokens = small_decoder(), texts(*[40] * 5)

    def spoil(plan):
        chunks = [
            c._replace(blocks=(plan.chunks[0].blocks[0], *c.blocks[1:])) if c.sequence == 1 else c for c in plan.chunks
        ]
        return dataclasses.replace(plan, chunks=tuple(chunks))

    got = ragged_passes(model, Sequences(caches(model)), tokens, spoil)
    assert_same(got[0], full_logits(model, tokens[0])[: len(got[0])])
    with pytest.raises(AssertionError):
        assert_same(got[1], full_logits(model, tokens[1])[: len(got[1])])


@pytest.mark.parametrize(
    ("gathered_bytes", "kind", "prompt"), covering(GATHERED, KINDS, [3, 8, 14, 21]), indirect=["gathered_bytes"]
)
def test_sequences_that_share_blocks(small_decoder, kind, prompt):
    model, (text,) = small_decoder(kind), texts(prompt)
    answers = texts(*[9] * 6)
    sequences = Sequences(caches(model))
    feed(model, sequences, {0: text})
    for copy in range(1, 6):
        sequences.fork(0, copy)
    got = {sequence: [] for sequence in range(6)}
    for step in range(9):
        pieces = {sequence: answers[sequence][step : step + 1] for sequence in got}
        for sequence, logits in feed(model, sequences, pieces).items():
            got[sequence].append(logits)
    for sequence, logits in got.items():
        assert_same(torch.cat(logits), full_logits(model, text + answers[sequence])[prompt:])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_recycled_blocks_is_cleared(small_decoder, kind):
    model, (first, second) = small_decoder(kind), texts(30, 26)
    sequences = Sequences(caches(model))
    feed(model, sequences, {0: first[:29]})
    sequences.drop(0)
    got = [feed(model, sequences, {1: second[:13]})[1]]
    got += [feed(model, sequences, {1: second[at : at + 1]})[1] for at in range(13, 26)]
    assert_same(torch.cat(got), full_logits(model, second))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_rounds_as_one_pass_does(small_decoder, kind):
    model, tokens = small_decoder(kind), texts(*[40] * 5)
    got = ragged_passes(model, Sequences(caches(model), torch.bfloat16), tokens)
    exact = torch.cat([full_logits(model, text)[: len(logits)] for logits, text in zip(got, tokens, strict=True)])
    whole = [full_logits(model, text, torch.bfloat16)[: len(logits)] for logits, text in zip(got, tokens, strict=True)]
    assert (torch.cat(got) - exact).norm() < 1.3 * (torch.cat(whole) - exact).norm()


def test_nan_in_recycled_blocks_that_were_not_cleared_is_seen(small_decoder):
    model, (first, second) = small_decoder(), texts(10, 11)
    sequences = Sequences(caches(model))
    plan = sequences.plan({0: 9, 1: 10})
    sequences.pool.carry_out(dataclasses.replace(plan, fresh=()))
    positions = torch.cat([torch.arange(9), torch.arange(10)])
    model(torch.tensor(first[:9] + second[:10]), positions, sequences.pool.attend(plan))
    assert feed(model, sequences, {0: first[9:], 1: second[10:]})[0].isnan().any()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 50.0, 5.0])
@pytest.mark.parametrize(
    "split", [[160], [60, 60, 40], [100, *[1] * 60], [100, *[2] * 30]], ids=["prefill", "chunks", "decoding", "pairs"]
)
def test_large_scores_lose_nothing_that_bfloat16_can_hold(split, softcap, window):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(160, heads, 64, generator=generator) for heads in (4, 2, 2))
    most = torch.einsum("qhc,khc->hqk", q, k.repeat_interleave(2, dim=1)).abs().max() / 8
    tensors = [x.bfloat16() for x in (q * (30 / most).sqrt(), k * (30 / most).sqrt(), v)]  # scores reach 30
    options = {"scale": 1 / 8, "window": window, "softcap": softcap}
    exact = [x.double() for x in tensors]
    want = ReferenceAttention((0, 160))(0, exact[0], Keys(tuple(exact[1:])), **options)
    sequences = Sequences([LayerCache(((2, 64), (2, 64)), window)], torch.bfloat16)
    pieces = zip(*(x.split(split) for x in tensors), strict=True)
    got = torch.cat([sequences.attend({0: len(piece[0])})(0, piece[0], Keys(piece[1:]), **options) for piece in pieces])
    assert (got[100:].double() - want[100:]).norm() / want[100:].norm() < 3e-3
