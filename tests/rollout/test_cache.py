"""Cached decoding gives the logits of one pass over everything."""

from __future__ import annotations

import pytest
import torch
from builders.reference_attention import ReferenceAttention

from danlu.rollout.cache import CAPACITY_STEP, KVCache

KINDS = ["llama", "window", "softcap", "qk-norm"]


def full_logits(model, tokens):
    """Logits [S, V] of one uncached pass with a dense mask."""
    tokens = torch.tensor(tokens)
    return model.logits(model(tokens, torch.arange(len(tokens)), ReferenceAttention((0, len(tokens)))))


def feed(model, cache, pieces):
    """Logits [T, V] of one pass that brings pieces[b] to sequence b of the cache."""
    starts = list(cache.lengths)
    positions = [start + i for start, piece in zip(starts, pieces, strict=True) for i in range(len(piece))]
    tokens = [token for piece in pieces for token in piece]
    attend = cache.extend([len(piece) for piece in pieces])
    return model.logits(model(torch.tensor(tokens), torch.tensor(positions), attend))


def sequences(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [[20], [1] * 20, [7, 1, 1, 11], [1, 19]])
def test_one_sequence_in_pieces_equals_one_pass(small_decoder, kind, split):
    model, (tokens,) = small_decoder(kind), sequences(20)
    cache, got, start = KVCache(), [], 0
    for size in split:
        got.append(feed(model, cache, [tokens[start : start + size]]))
        start += size
    torch.testing.assert_close(torch.cat(got), full_logits(model, tokens), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch_equals_each_alone(small_decoder, kind):
    model, tokens = small_decoder(kind), sequences(17, 9, 12)
    cache = KVCache(3)
    got = [[row] for row in feed(model, cache, [tokens[0][:10], tokens[1][:2], tokens[2][:5]]).split([10, 2, 5])]
    for step in range(7):
        starts = (10, 2, 5)
        logits = feed(
            model, cache, [t[start + step : start + step + 1] for t, start in zip(tokens, starts, strict=True)]
        )
        for row, pieces in enumerate(got):
            pieces.append(logits[row : row + 1])
    for t, pieces in zip(tokens, got, strict=True):
        torch.testing.assert_close(
            torch.cat(pieces), full_logits(model, t)[: len(torch.cat(pieces))], atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 50.0, 5.0])
@pytest.mark.parametrize("split", [[160], [60, 60, 40], [100, *[1] * 60]], ids=["prefill", "chunks", "decoding"])
def test_large_scores_lose_nothing_that_bfloat16_can_hold(split, softcap, window):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(160, heads, 64, generator=generator) for heads in (4, 2, 2))
    most = torch.einsum("qhc,khc->hqk", q, k.repeat_interleave(2, dim=1)).abs().max() / 8
    tensors = [x.bfloat16() for x in (q * (30 / most).sqrt(), k * (30 / most).sqrt(), v)]  # scores reach 30
    options = {"scale": 1 / 8, "window": window, "softcap": softcap}
    want = ReferenceAttention((0, 160))(0, *(x.double() for x in tensors), **options)
    cache, pieces = KVCache(), zip(*(x.split(split) for x in tensors), strict=True)
    got = torch.cat([cache.extend([len(piece[0])])(0, *piece, **options) for piece in pieces])
    assert (got[100:].double() - want[100:]).norm() / want[100:].norm() < 3e-3


def test_a_pass_may_leave_sequences_out(small_decoder):
    model, (a, b) = small_decoder(), sequences(8, 6)
    cache = KVCache(2)
    feed(model, cache, [a[:3], []])
    feed(model, cache, [[], b[:4]])
    logits = feed(model, cache, [a[3:], b[4:]])
    expected = torch.cat((full_logits(model, a)[3:], full_logits(model, b)[4:]))
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_equal_lengths_need_no_mask_and_agree(small_decoder):
    model, tokens = small_decoder("window"), sequences(9, 9)
    cache = KVCache(2)
    feed(model, cache, [t[:8] for t in tokens])
    logits = feed(model, cache, [t[8:] for t in tokens])
    expected = torch.stack([full_logits(model, t)[-1] for t in tokens])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def capacity(cache: KVCache) -> int:
    return cache.buffers(0, torch.empty(0))[0].shape[2]


def test_growing_past_a_step_of_capacity_keeps_what_is_there(small_decoder):
    model, (tokens,) = small_decoder("softcap"), sequences(CAPACITY_STEP + 3)
    cache = KVCache()
    feed(model, cache, [tokens[:CAPACITY_STEP]])
    before = capacity(cache)
    logits = feed(model, cache, [tokens[CAPACITY_STEP:]])
    assert capacity(cache) > before
    torch.testing.assert_close(logits, full_logits(model, tokens)[CAPACITY_STEP:], atol=2e-5, rtol=1e-5)


def test_truncate_forgets(small_decoder):
    model, (tokens, other) = small_decoder(), sequences(12, 12)
    cache = KVCache()
    feed(model, cache, [tokens])
    cache.truncate(0, 5)
    mixed = tokens[:5] + other[5:]
    logits = feed(model, cache, [mixed[5:]])
    torch.testing.assert_close(logits, full_logits(model, mixed)[5:], atol=2e-5, rtol=1e-5)
    with pytest.raises(AssertionError, match="cannot cut 12 tokens to 13"):
        cache.truncate(0, 13)


def test_fork_continues_apart(small_decoder):
    model, (tokens, other) = small_decoder(), sequences(10, 10)
    cache = KVCache(2)
    feed(model, cache, [tokens[:6], other[:4]])
    forked = cache.fork([0, 1, 0])
    logits = feed(model, forked, [tokens[6:7], other[4:5], other[6:7]])
    expected = [
        full_logits(model, tokens[:7])[-1],
        full_logits(model, other[:5])[-1],
        full_logits(model, tokens[:6] + other[6:7])[-1],
    ]
    torch.testing.assert_close(logits, torch.stack(expected), atol=2e-5, rtol=1e-5)
    assert cache.fork([0, 1]) is cache


@pytest.mark.parametrize("gone", [[0], [3], [0, 3], [1, 2], [0, 1, 2], []])
def test_drop_moves_rows_and_says_where(small_decoder, gone):
    model, tokens = small_decoder(), sequences(9, 7, 11, 6)
    cache = KVCache(4)
    feed(model, cache, [t[:-1] for t in tokens])
    order = cache.drop(gone)
    assert sorted(order) == [row for row in range(4) if row not in gone]
    logits = feed(model, cache, [tokens[row][-1:] for row in order])
    expected = torch.stack([full_logits(model, tokens[row])[-1] for row in order])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["window", "softcap"])
def test_control_a_cache_without_window_or_softcap_is_noticed(small_decoder, kind):
    """The negative control: an attend that forgets the window and softcap must not pass."""
    model, (tokens,) = small_decoder(kind), sequences(20)
    cache = KVCache()

    def careless(attend):
        return lambda layer, q, k, v, *, scale, window, softcap: attend(
            layer, q, k, v, scale=scale, window=None, softcap=None
        )

    model(torch.tensor(tokens[:19]), torch.arange(19), careless(cache.extend([19])))
    hidden = model(torch.tensor(tokens[19:]), torch.tensor([19]), careless(cache.extend([1])))
    assert (model.logits(hidden) - full_logits(model, tokens)[-1]).abs().max() > 1e-2
