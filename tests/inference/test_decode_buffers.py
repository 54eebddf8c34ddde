"""Buffers of decoding: which passes go on with them, and what is in them; attention over them is in test_paged.py."""

from __future__ import annotations

import math

import pytest
import torch

from danlu.core.layer_types import Keys, LayerCache
from danlu.inference import decode_buffers
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan

CPU = torch.device("cpu")
HEADS, WIDTH, BLOCK = 2, 4, 4


def pool_of(tokens):
    """A pool whose sequence s has the blocks 8 s to 8 s + 7, filled with random keys and values."""
    pool = CachePool(
        [LayerCache(((HEADS, WIDTH), (HEADS, WIDTH)), None)], blocks=32, block=BLOCK, dtype=torch.float32, device=CPU
    )
    generator = torch.Generator().manual_seed(0)
    for blocks in pool.tensors(0):
        blocks.copy_(torch.randn(blocks.shape, generator=generator))
    return pool


def decode(pool, positions, *, expect_gathered):
    """One pass of one token of each sequence, compared with attention over what the pool has."""
    chunks = tuple(Chunk(s, p, p + 1, range(8 * s, 8 * s + 8), p + 1) for s, p in positions.items())
    plan = Plan(chunks=chunks)
    pool.carry_out(plan)
    q, k, v = (torch.randn(len(chunks), heads, WIDTH) for heads in (2 * HEADS, HEADS, HEADS))
    attend = pool.attend(plan)
    kept = dict(pool.decode_buffers._layers)
    out = attend(0, q, Keys((k, v)), scale=0.5, window=None, softcap=None)
    assert (kept.get(0) is not pool.decode_buffers._layers.get(0)) == expect_gathered
    for row, chunk in enumerate(chunks):
        keys, values = pool.gather(0, torch.tensor(list(chunk.blocks)), chunk.stop)  # [S, K, C]
        scores = torch.einsum("kgc,skc->kgs", q[row].view(HEADS, 2, WIDTH), keys) * 0.5
        expected = torch.einsum("kgs,skc->kgc", scores.softmax(-1), values).reshape(2 * HEADS, WIDTH)
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [{0: 9, 1: 9, 2: 9}, {0: 10, 1: 9, 2: 8}], ids=["alike", "ragged"])
def test_the_same_sequences_go_on(lengths):
    pool = pool_of(32)
    decode(pool, lengths, expect_gathered=True)
    for step in range(1, 6):
        decode(pool, {s: p + step for s, p in lengths.items()}, expect_gathered=False)


def test_others_are_gathered_anew():
    pool = pool_of(32)
    decode(pool, {0: 9, 1: 9, 2: 9}, expect_gathered=True)
    decode(pool, {0: 10, 2: 10}, expect_gathered=True)  # one of three has ended
    decode(pool, {0: 11, 2: 11}, expect_gathered=False)
    decode(pool, {2: 12, 0: 12}, expect_gathered=True)  # another order
    decode(pool, {2: 14, 0: 14}, expect_gathered=True)  # a pass that went elsewhere came between
    pool.decode_buffers.clear()
    decode(pool, {2: 15, 0: 15}, expect_gathered=True)


def test_what_was_left_in_memory_is_not_seen():
    pool = pool_of(32)
    decode(pool, {0: 20, 1: 20}, expect_gathered=True)
    for storage in pool.decode_buffers._storage.values():
        storage.fill_(math.nan)
    decode(pool, {0: 9, 1: 8}, expect_gathered=True)
    for step in range(1, 5):
        decode(pool, {0: 9 + step, 1: 8 + step}, expect_gathered=False)


def test_a_stale_buffer_would_be_noticed():
    pool = pool_of(32)
    decode(pool, {0: 9, 1: 9}, expect_gathered=True)
    for layer in pool.decode_buffers._layers.values():
        layer.buffers[0].add_(1)
    with pytest.raises(AssertionError):
        decode(pool, {0: 10, 1: 10}, expect_gathered=False)


def test_much_and_uneven_is_not_kept(monkeypatch):
    pool = pool_of(32)
    buffers = pool.decode_buffers
    chunks = [Chunk(s, p, p + 1, range(8), p + 1) for s, p in ((0, 29), (1, 2), (2, 3))]
    assert buffers.rows_of(chunks, pool.token_bytes) is None
    assert buffers.rows_of(chunks[:1], pool.token_bytes) is not None
    buffers.clear()
    monkeypatch.setattr(decode_buffers, "DECODE_BUFFER_BYTES", 1000)
    assert buffers.rows_of(chunks[:1], pool.token_bytes) is None


@pytest.mark.parametrize("ragged", [False, True])
def test_a_few_that_have_ended_are_computed_on(monkeypatch, ragged):
    monkeypatch.setattr(decode_buffers, "ENDED_SHARE", 1 / 2)
    pool = pool_of(32)
    positions = {s: 9 - ragged * (s % 2) for s in range(4)}

    def step(*sequences, expect_gathered=False):
        for sequence in sequences:
            positions[sequence] += 1
        decode(pool, {s: positions[s] for s in sequences}, expect_gathered=expect_gathered)

    step(0, 1, 2, 3, expect_gathered=True)
    step(0, 2, 3)
    step(2, 3)  # the first row is nobody's
    step(2, 3)
    step(3, expect_gathered=True)  # three of four have ended
    positions[2] += 1
    step(2, 3, expect_gathered=True)  # one that was away has not what came meanwhile


def test_control_a_row_that_is_nobodys_is_not_read(monkeypatch):
    monkeypatch.setattr(decode_buffers, "ENDED_SHARE", 1 / 2)
    pool = pool_of(32)
    decode(pool, {0: 9, 1: 9}, expect_gathered=True)
    rows_of = decode_buffers.DecodeBuffers.rows_of

    def wrong(self, chunks, token_bytes):
        rows = rows_of(self, chunks, token_bytes)
        rows.live = torch.zeros_like(rows.live)
        rows.of_rows = torch.tensor([0, 0])
        return rows

    monkeypatch.setattr(decode_buffers.DecodeBuffers, "rows_of", wrong)
    with pytest.raises(AssertionError):
        decode(pool, {1: 10}, expect_gathered=False)
