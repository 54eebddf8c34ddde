"""Attention in blocks of keys against one dense mask, and its bits in any company against themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.covering import covering, fast_pairs
from builders.reference_attention import BOUNDARIES, CHAINS, SIBLINGS, TREES, ReferenceAttention
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.core.types import Branch
from danlu.models import blockwise
from danlu.models.attend import BlockwiseAttention, PackedAttention, attend_for
from danlu.models.blockwise import KEY_BLOCK, Attended, BlockwiseQueries, QueryRun, attend_block, merge

LENGTH = 200
"""Of a sequence: four blocks of keys."""

KINDS = [(None, None), (3, None), (70, None), (None, 2.0), (7, 1.0)]
"""(window, softcap)"""


def inputs(tokens: int, kv_heads: int, dtype: torch.dtype = torch.float64, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(tokens, 4, width), (tokens, kv_heads, width), (tokens, kv_heads, width)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def results(strategy: Any, tensors: list[Tensor], window: int | None, softcap: float | None) -> list[Tensor]:
    out = strategy(0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=window, softcap=softcap)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


@pytest.mark.parametrize(
    ("trees", "kind", "kv_heads", "query_rows", "key_block"),
    covering([(), TREES, CHAINS], KINDS, [1, 2, 4], [1, 6, 32], [4, 64], strength=3),
)
def test_values_and_gradients_are_those_of_a_dense_mask(
    trees: tuple[Branch, ...],
    kind: tuple[int | None, float | None],
    kv_heads: int,
    query_rows: int,
    key_block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blockwise, "KEY_BLOCK", key_block)
    monkeypatch.setattr(blockwise, "QUERY_ROWS", query_rows)
    window, softcap = kind
    tensors = inputs(40, kv_heads)
    want = results(ReferenceAttention(BOUNDARIES, trees), tensors, window, softcap)
    for got, expected in zip(
        results(BlockwiseAttention(BOUNDARIES, trees), tensors, window, softcap), want, strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    if trees == TREES:
        wrong = results(BlockwiseAttention(BOUNDARIES, SIBLINGS), tensors, window, softcap)
        assert not torch.allclose(wrong[0], want[0])


def test_gradients_are_those_of_finite_differences() -> None:
    q, k, v = inputs(9, 2, width=3)
    attend = BlockwiseAttention((0, 4, 9))
    assert torch.autograd.gradcheck(lambda q, *x: attend(0, q, Keys(x), scale=0.5, window=3, softcap=2.0), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_as_exact_as_the_written_out_form(dtype: torch.dtype) -> None:
    exact = results(ReferenceAttention(BOUNDARIES), inputs(40, 2), None, None)
    limit = 1e-5 if dtype == torch.float32 else 0.02
    got = results(BlockwiseAttention(BOUNDARIES), inputs(40, 2, dtype), None, None)
    for one, want in zip(got, exact, strict=True):
        assert one.dtype == dtype
        assert (one.double() - want).norm() / want.norm() < limit


def in_chunks(tensors: list[Tensor], sizes: list[int], window: int | None, softcap: float | None) -> Tensor:
    """A sequence's queries a chunk at a time, over the keys so far, which lie behind another sequence's."""
    q, k, v = tensors
    other = torch.full((5, *k.shape[1:]), 3.0, dtype=k.dtype)
    outs, start = [], 0
    for size in sizes:
        stop = start + size
        runs = [QueryRun(1, 4, ((0, 5),)), QueryRun(size, start, ((5, 5 + stop),))]
        queries = BlockwiseQueries(runs, q.device)
        q_of_pass = torch.cat((q[:1] + 1, q[start:stop]))
        keys, values = (torch.cat((other, x[:stop])) for x in (k, v))
        outs.append(queries.attend(q_of_pass, keys, values, scale=0.3, window=window, softcap=softcap)[1:])
        start = stop
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "mask"),
    fast_pairs([torch.float32, torch.bfloat16], [1, 2, 4], [(None, None), (3, None), (70, None), (None, 2.0)]),
)
@torch.no_grad()
def test_bits_are_the_same_in_a_pack_a_tree_a_chunk_and_alone(
    dtype: torch.dtype, kv_heads: int, mask: tuple[int | None, float | None]
) -> None:
    window, softcap = mask
    tensors = inputs(LENGTH, kv_heads, dtype, width=24)
    options: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap}
    whole = BlockwiseAttention((0, LENGTH))(0, tensors[0], Keys(tuple(tensors[1:])), **options)
    one_by_one = [1] * LENGTH if kv_heads == 2 else [100, *[1] * 40, LENGTH - 140]  # past the end of a block
    for sizes in ([LENGTH], one_by_one, [130, 1, 1, 5, 63], [7, 64, 129]):
        assert torch.equal(in_chunks(tensors, sizes, window, softcap), whole)
    before = [torch.randn(37, *x.shape[1:]).to(dtype) for x in tensors]
    q, *keys = map(torch.cat, zip(before, tensors, strict=True))
    packed = BlockwiseAttention((0, 37, 37 + LENGTH))(0, q, Keys(tuple(keys)), **options)
    assert torch.equal(packed[37:], whole)
    # A stem that ends inside a block, and two branches: the second is the sequence's rest, the first something else.
    stem, other = 100, 11
    trees = (Branch(-1, 0, stem), Branch(0, stem, stem + other), Branch(0, stem + other, LENGTH + other))
    of_tree = [torch.cat((x[:stem], x[:other] + 1, x[stem:])) for x in tensors]
    tree = BlockwiseAttention((0, LENGTH + other), trees)(0, of_tree[0], Keys(tuple(of_tree[1:])), **options)
    assert torch.equal(torch.cat((tree[:stem], tree[stem + other :])), whole)
    if window is None:  # the control: torch's own kernels
        assert not torch.equal(PackedAttention((0, LENGTH))(0, tensors[0], Keys(tuple(tensors[1:])), **options), whole)


@torch.no_grad()
def test_another_size_of_blocks_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(LENGTH, 2, torch.float32)
    whole = BlockwiseAttention((0, LENGTH))(
        0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=None, softcap=None
    )
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 48)
    other = BlockwiseAttention((0, LENGTH))(
        0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=None, softcap=None
    )
    assert not torch.equal(whole, other)
    torch.testing.assert_close(whole, other, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_block_that_is_not_seen_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 5, 8, generator=generator)
    k, v = (torch.randn(3, 2, KEY_BLOCK, 8, generator=generator) for _ in range(2))
    visible = torch.rand(3, 5, KEY_BLOCK, generator=generator) < 0.5
    visible[1] = False
    block = attend_block(q, k, v, visible, scale=0.4)
    hidden = attend_block(q, k, v, torch.zeros_like(visible), scale=0.4)
    assert hidden.out.eq(0).all() and hidden.lse.isneginf().all()
    assert block.out[1].eq(0).all() and block.lse[1].isneginf().all()
    for merged in (merge(block, hidden), merge(hidden, block)):
        assert all(torch.equal(one, other) for one, other in zip(merged, block, strict=True))
    scores = (q @ k.transpose(2, 3) * 0.4).masked_fill(~visible.unsqueeze(1), float("-inf"))
    torch.testing.assert_close(block.lse, scores.logsumexp(-1))
    both = merge(block, Attended(block.out + 1, block.lse))
    torch.testing.assert_close(both.out[0], block.out[0] + 0.5)
    torch.testing.assert_close(both.lse[0], block.lse[0] + torch.tensor(2.0).log())


def test_attention_of_a_batch_is_as_numerics_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packed:
        boundaries, trees = BOUNDARIES, TREES

    assert isinstance(attend_for(Packed()), PackedAttention)  # type: ignore[arg-type]
    assert isinstance(attend_for(Packed(), exact=True), BlockwiseAttention)  # type: ignore[arg-type]
