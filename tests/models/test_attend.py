"""Packed attention against one dense mask, forward and backward, at every way it can be asked."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from builders.covering import covering
from builders.reference_attention import (
    BOUNDARIES,
    CHAINS,
    ROOTS,
    SIBLINGS,
    TREES,
    ReferenceAttention,
    masked_attention,
)
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.core.types import Branch
from danlu.models import attend, attention_kernels, block_attention
from danlu.models.attend import BlockwiseAttention, PackedAttention, visible
from danlu.models.segments import documents_of


def inputs(kv_heads: int, dtype: torch.dtype = torch.float64, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(40, 4, width), (40, kv_heads, width), (40, kv_heads, width)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def results(strategy: object, tensors: list[Tensor], window: int | None, softcap: float | None) -> list[Tensor]:
    out = strategy(0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=window, softcap=softcap)  # type: ignore[operator]
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


@pytest.mark.parametrize("short", [0, 768])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (7, 1.0), (100, None)])
def test_packed_equals_a_dense_mask(
    short: int, kv_heads: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "SHORT_DOCUMENT", short)
    monkeypatch.setattr(block_attention, "BLOCK_ROWS", 6)  # several blocks a document
    monkeypatch.setattr(block_attention, "ROW_MULTIPLE", 4)  # some of them filled up
    tensors = inputs(kv_heads)
    want = results(ReferenceAttention(BOUNDARIES), tensors, window, softcap)
    for got, expected in zip(results(PackedAttention(BOUNDARIES), tensors, window, softcap), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    # Negative control: other document borders are seen.
    wrong = results(PackedAttention((0, 5, 7, 23, 40)), tensors, window, softcap)
    assert not torch.allclose(wrong[0], want[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_as_exact_as_the_written_out_form(dtype: torch.dtype) -> None:
    exact = results(ReferenceAttention(BOUNDARIES), inputs(2), None, None)
    tensors = inputs(2, dtype)
    limit = 1e-5 if dtype == torch.float32 else 0.02
    for got, want in zip(results(PackedAttention(BOUNDARIES), tensors, None, None), exact, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() / want.norm() < limit


def large_scores() -> tuple[list[Tensor], Tensor]:
    """q, k, v in bfloat16 whose scores at scale 1/8 reach 30, and a gradient for what comes out."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(160, heads, 64, generator=generator) for heads in (4, 2, 2, 4))
    most = torch.einsum("qhc,khc->hqk", q, k.repeat_interleave(2, dim=1)).abs().max() / 8
    stretch = (30 / most).sqrt()
    return [x.bfloat16().requires_grad_() for x in (q * stretch, k * stretch, v)], grad.bfloat16()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 50.0, 5.0])
def test_large_scores_lose_nothing_that_bfloat16_can_hold(window: int | None, softcap: float | None) -> None:
    tensors, grad = large_scores()
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = ReferenceAttention((0, 160))(
        0, exact[0], Keys(tuple(exact[1:])), scale=1 / 8, window=window, softcap=softcap
    )
    got = PackedAttention((0, 160))(
        0, tensors[0], Keys(tuple(tensors[1:])), scale=1 / 8, window=window, softcap=softcap
    )
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]
    # One rounding of probabilities and one of the result: two of 2^-9 and a little more; scores rounded to bfloat16
    # miss this by two to eight times.
    for one, expected in zip([got, *torch.autograd.grad(got, tensors, grad)], wanted, strict=True):
        assert (one.double() - expected).norm() / expected.norm() < 5e-3
    # Negative control: scores that were rounded once.
    if softcap is None and window is None:
        q, k, v = exact
        scores = torch.einsum("qhc,khc->hqk", q, k.repeat_interleave(2, dim=1)).bfloat16().double() / 8
        seen = visible(160, 160, None, torch.device("cpu"))
        probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        rounded = torch.einsum("hqk,khc->qhc", probabilities, v.repeat_interleave(2, dim=1))
        assert (rounded - want).norm() / want.norm() > 5e-3


def test_packed_equals_one_document_at_a_time() -> None:
    tensors = inputs(2)
    together = PackedAttention(BOUNDARIES)(
        0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=None, softcap=None
    )
    for start, end in itertools.pairwise(BOUNDARIES):
        document = PackedAttention((0, end - start))
        own = [x[start:end] for x in tensors]
        alone = document(0, own[0], Keys(tuple(own[1:])), scale=0.3, window=None, softcap=None)
        torch.testing.assert_close(together[start:end], alone, rtol=0, atol=0)


@pytest.mark.parametrize("short", [0, 8, 13, 768])  # squared: the most scores of a segment that is done in blocks
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (7, 1.0), (100, None)])
def test_branches_see_their_ancestors_and_nothing_beside_them(
    short: int, kv_heads: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "SHORT_DOCUMENT", short)
    monkeypatch.setattr(block_attention, "BLOCK_ROWS", 6)
    monkeypatch.setattr(block_attention, "ROW_MULTIPLE", 4)
    monkeypatch.setattr(attend, "BRANCH_ROWS", 3)
    monkeypatch.setattr(attention_kernels, "DOCUMENT_MULTIPLE", 3)
    tensors = inputs(kv_heads)
    want = results(ReferenceAttention(BOUNDARIES, TREES), tensors, window, softcap)
    for got, expected in zip(results(PackedAttention(BOUNDARIES, TREES), tensors, window, softcap), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    for mistake in (SIBLINGS, ()):  # negative controls
        assert not torch.allclose(results(PackedAttention(BOUNDARIES, mistake), tensors, window, softcap)[0], want[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [700, 800])  # of the stem: in blocks, and by torch's kernel
def test_long_branches_are_as_exact_as_the_written_out_form(length: int, dtype: torch.dtype) -> None:
    trees = (Branch(-1, 0, length), Branch(0, length, length + 40), Branch(0, length + 40, length + 640))
    generator = torch.Generator().manual_seed(5)
    exact = [torch.randn(length + 640, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    wanted = results(ReferenceAttention((0, length + 640), trees), [x.requires_grad_() for x in exact], None, None)
    tensors = [x.detach().to(dtype).requires_grad_() for x in exact]
    limit = 1e-5 if dtype == torch.float32 else 0.02
    for got, want in zip(results(PackedAttention((0, length + 640), trees), tensors, None, None), wanted, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() / want.norm() < limit


@pytest.mark.parametrize("window", [None, 7])
def test_documents_beside_a_tree_and_chains_have_the_bits_that_they_have_without(window: int | None) -> None:
    tensors = inputs(2, torch.float32)
    plain = results(PackedAttention(BOUNDARIES), tensors, window, None)
    for same in (ROOTS, CHAINS):
        for got, want in zip(results(PackedAttention(BOUNDARIES, same), tensors, window, None), plain, strict=True):
            assert torch.equal(got, want)
    beside = results(PackedAttention(BOUNDARIES, TREES), tensors, window, None)
    for got, want in zip(beside, plain, strict=True):
        assert torch.equal(got[:6], want[:6]) and not torch.equal(got[6:], want[6:])
    assert torch.equal(beside[0][23:36], plain[0][23:36])  # a stem and its first branch go on as a document does


def test_what_is_not_a_number_stays_in_its_branch() -> None:
    tensors = [x.detach() for x in inputs(2)]
    for x in tensors:
        x[30:36] = float("nan")
    out = PackedAttention(BOUNDARIES, TREES)(
        0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=None, softcap=None
    )
    assert out[30:36].isnan().all()
    assert out[:30].isfinite().all() and out[36:].isfinite().all()


def test_what_is_not_a_number_stays_in_its_document() -> None:
    tensors = [x.detach() for x in inputs(2)]
    for x in tensors:
        x[6:23] = float("nan")
    out = PackedAttention(BOUNDARIES)(0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=None, softcap=None)
    assert out[6:23].isnan().all()
    assert out[:6].isfinite().all() and out[23:].isfinite().all()


def test_long_documents_stand_alone_between_runs_of_short_ones() -> None:
    documents = documents_of((0, 5, 6, 106, 110, 300, 500), ())
    runs = attend._runs(documents, lambda segment: segment.path_length < 50)
    assert [tuple(segment.start for segment in run) for run in runs] == [(0, 5), (6,), (106,), (110,), (300,)]


@pytest.mark.parametrize("window", [None, 300, 4096])
def test_masks_that_are_kept_take_little_memory_whatever_lengths_come(window: int | None) -> None:
    block_attention._triangle.cache_clear()
    for length in (7, 290, 300, 512, 777, 4100, 4500):
        x = torch.zeros(length, 1, 2)
        PackedAttention((0, length))(0, x, Keys((x, x)), scale=1.0, window=window, softcap=3.0)
    kept = block_attention._triangle.cache_info()
    sizes = block_attention.BLOCK_ROWS // block_attention.ROW_MULTIPLE
    assert 0 < kept.currsize <= 2 * sizes
    assert kept.maxsize is not None and kept.maxsize * block_attention.BLOCK_ROWS**2 * 4 <= 16 * 2**20


def test_visible_counts_the_token_itself_in_the_window() -> None:
    assert visible(2, 4, None, torch.device("cpu")).tolist() == [[True, True, True, False], [True] * 4]
    assert visible(2, 4, 2, torch.device("cpu")).tolist() == [[False, True, True, False], [False, False, True, True]]


def test_masked_attention_is_a_weighted_mean_of_what_is_seen() -> None:
    v = torch.randn(3, 1, 4)
    out = masked_attention(
        torch.zeros(1, 2, 4), torch.zeros(3, 1, 4), v, torch.tensor([[True, True, False]]), scale=1.0, softcap=None
    )
    torch.testing.assert_close(out[0], v[:2].mean(0).expand(2, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (100, None), (None, 2.0), (7, 1.0)])
def test_the_kernels_of_a_gpu_equal_a_dense_mask(kv_heads: int, window: int | None, softcap: float | None) -> None:
    rounded = [x.detach().bfloat16() for x in inputs(kv_heads, width=16)]
    exact = [x.double().requires_grad_() for x in rounded]
    wanted = results(ReferenceAttention(BOUNDARIES), exact, window, softcap)
    tensors = [x.cuda().requires_grad_() for x in rounded]
    for got, want in zip(results(PackedAttention(BOUNDARIES), tensors, window, softcap), wanted, strict=True):
        assert (got.double().cpu() - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize(
    ("has_sinks", "width", "kind", "short", "trees", "exact"),
    # short: by torch's kernel where that can be, or in blocks
    covering(
        [False, True], [5, 8, 11], [(None, None), (3, None), (7, 1.0)], [0, 768], [(), TREES], [False, True], strength=3
    ),
)
def test_sinks_and_values_of_another_width(
    has_sinks: bool,
    width: int,
    kind: tuple[int | None, float | None],
    short: int,
    trees: tuple[Branch, ...],
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_kernels, "SHORT_DOCUMENT", short)
    monkeypatch.setattr(block_attention, "BLOCK_ROWS", 6)
    monkeypatch.setattr(block_attention, "ROW_MULTIPLE", 4)
    window, softcap = kind
    q, k, _ = inputs(2)
    v = torch.randn(40, 2, width, generator=torch.Generator().manual_seed(9), dtype=torch.float64).requires_grad_()
    # One that takes nearly all of a row's probability, and one that takes none.
    sinks = torch.tensor([0.5, -1.0, 30.0, -60.0], dtype=torch.float64, requires_grad=True) if has_sinks else None
    leaves = [q, k, v, *([] if sinks is None else [sinks])]
    found = []
    for strategy in ((BlockwiseAttention if exact else PackedAttention), ReferenceAttention):
        attended = strategy(BOUNDARIES, trees)
        out = attended(0, q, Keys((k, v)), scale=0.3, window=window, softcap=softcap, sinks=sinks)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    if sinks is not None:  # negative control: scores, and not what they add up to, take a sink's share
        without = ReferenceAttention(BOUNDARIES, trees)(0, q, Keys((k, v)), scale=0.3, window=window, softcap=softcap)
        assert not torch.allclose(without.detach(), found[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trees", [(), TREES])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (7, 1.0)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_probabilities_that_are_computed_again_have_the_same_bits(
    has_sinks: bool,
    window: int | None,
    softcap: float | None,
    trees: tuple[Branch, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_attention, "BLOCK_ROWS", 6)
    monkeypatch.setattr(block_attention, "ROW_MULTIPLE", 4)
    leaves = inputs(2, dtype)
    sinks = torch.tensor([0.5, -1.0, 30.0, -60.0], requires_grad=True) if has_sinks else None
    leaves += [] if sinks is None else [sinks]
    given = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    saved: list[int] = []  # numbers of what is neither an input nor the output

    def results_of(attended: PackedAttention, layer: int) -> list[Tensor]:
        saved.append(0)

        def count(tensor: Tensor) -> Tensor:
            saved[-1] += 0 if tensor.untyped_storage().data_ptr() in given else tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            out = attended(
                layer, leaves[0], Keys(tuple(leaves[1:3])), scale=0.3, window=window, softcap=softcap, sinks=sinks
            )
        weight = torch.linspace(-1, 1, out.numel()).to(dtype).view_as(out)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]

    kept = results_of(PackedAttention(BOUNDARIES, trees), 1)
    again = PackedAttention(BOUNDARIES, trees, recomputed_layers={1})
    assert all(map(torch.equal, results_of(again, 1), kept))
    assert saved[0] > 0 and saved[1] == 0
    results_of(again, 2)  # negative control: another layer keeps its own
    assert saved[2] == saved[0]


@pytest.mark.parametrize("short", [0, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_in_narrow_types(dtype: torch.dtype, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "SHORT_DOCUMENT", short)
    found = []
    for tensors in (inputs(2, dtype, 32), inputs(2, width=32)):
        sinks = torch.tensor([0.5, -1.0, 2.0, 5.0], dtype=torch.float64).to(torch.float32).requires_grad_()
        strategy = PackedAttention(BOUNDARIES) if tensors[0].dtype == dtype else ReferenceAttention(BOUNDARIES)
        out = strategy(0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=None, softcap=None, sinks=sinks)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), [*tensors, sinks])])
    limit = 1e-5 if dtype == torch.float32 else 0.02
    for got, want in zip(*found, strict=True):
        assert (got.double() - want.double()).norm() / want.double().norm() < limit
    assert found[0][-1].dtype == torch.float32, "the gradient of a parameter has its type"


def test_a_sink_is_a_share_of_the_probability() -> None:
    """Scores of 4, 3, 2 and 1 and a sink of 4: a value gets exp(score - 4) / (1 + e^-1 + e^-2 + e^-3 + 1)."""
    q, k = torch.ones(4, 1, 1), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1)
    total = sum(math.exp(-down) for down in range(4))
    for strategy in (PackedAttention((0, 4)), BlockwiseAttention((0, 4))):
        for column, score in enumerate((1, 2, 3, 4)):
            v = torch.zeros(4, 1, 1)
            v[column] = 1
            options = {"scale": 1.0, "window": None, "softcap": None}
            without = strategy(0, q, Keys((k, v)), **options)[3]
            with_sink = strategy(0, q, Keys((k, v)), sinks=torch.tensor([4.0]), **options)[3]
            assert without.item() == pytest.approx(math.exp(score - 4) / total, rel=1e-6)
            assert with_sink.item() == pytest.approx(math.exp(score - 4) / (total + 1), rel=1e-6)


@pytest.mark.parametrize("trees", [(), TREES], ids=["documents", "trees"])
def test_one_object_is_asked_in_turn_with_other_settings(trees: tuple[Branch, ...]) -> None:
    """What it keeps for layers that are alike is nothing to layers that differ, in whatever order they come."""
    q, k, v = (x.detach() for x in inputs(2))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {"window": None, "softcap": None, "scale": 0.3}),
        (torch.float32, {"window": 4, "softcap": None, "scale": 0.3}),
        (torch.float64, {"window": 4, "softcap": None, "scale": 0.3}),
        (torch.float64, {"window": 4, "softcap": 2.0, "scale": 0.3}),
        (torch.float64, {"window": 4, "softcap": 3.0, "scale": 0.3}),
        (torch.float64, {"window": 4, "softcap": 3.0, "scale": 0.3, "sinks": sinks}),
        (torch.float64, {"window": 6, "softcap": None, "scale": 0.3, "sinks": sinks}),
        (torch.float32, {"window": 6, "softcap": None, "scale": 0.5}),
    ]
    shared, seen = PackedAttention(BOUNDARIES, trees), []
    for dtype, more in (*settings, *reversed(settings)):
        of_type = [x.to(dtype) for x in (q, k, v)]
        out = shared(0, of_type[0], Keys((of_type[1], of_type[2])), **more)
        fresh = PackedAttention(BOUNDARIES, trees)(0, of_type[0], Keys((of_type[1], of_type[2])), **more)
        assert out.dtype == dtype and torch.equal(out, fresh), more
        seen.append(out.double())
    for one, other in itertools.pairwise(seen[: len(settings)]):  # the control: settings count
        assert not torch.equal(one, other)
