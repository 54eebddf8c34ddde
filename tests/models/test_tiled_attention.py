"""Attention in tiles of chunks that lie in any order against one dense mask, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from builders.covering import covering
from builders.flash_stub import stub_kernels
from builders.reference_attention import ReferenceAttention
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.core.types import Run
from danlu.models import attention_kernels, tiled_attention
from danlu.models.attention_kernels import CpuTiles, Kernels, TileCall, TileKernel, VarlenTiles, kernels_of
from danlu.models.tiled_attention import (
    Tile,
    TiledAttention,
    TileSettings,
    plan_tiles,
    tile_kernel_for,
    tiles_between,
)

BOUNDARIES = (0, 5, 6, 37, 60)
CHUNKS = ((40, 60), (6, 11), (0, 5), (21, 37), (37, 40), (5, 6), (11, 21))
"""Tokens of the pack as they lie in rows: of one document in several places, a later one before an earlier one."""
KINDS = [(None, None), (3, None), (11, None), (20, None), (None, 2.0), (7, 1.0), (100, None)]
"""(window, softcap)"""
KERNELS: dict[str, TileKernel | None] = {
    "products": None,
    "cpu": CpuTiles(),
    "varlen": stub_kernels()[1].tiles,
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_attention, "QUERY_ROWS", 6)
    monkeypatch.setattr(tiled_attention, "KEY_ROWS", 8)
    monkeypatch.setattr(attention_kernels, "SMALLEST_NARROW_TILE", 0)


def rows() -> list[Run]:
    """`CHUNKS` as rows laid end to end."""
    laid, row = [], 0
    for start, stop in CHUNKS:
        document = max(number for number, first in enumerate(BOUNDARIES) if first <= start)
        laid.append(Run(document, start - BOUNDARIES[document], row, row + stop - start))
        row += stop - start
    return laid


def order() -> Tensor:
    """[T] the token of each row."""
    return torch.cat([torch.arange(start, stop) for start, stop in CHUNKS])


def inputs(kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v with values narrower than keys, and sinks."""
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(60, 4, 8), (60, kv_heads, 8), (60, kv_heads, 5), (4,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


def tiled(
    tensors: list[Tensor], tiles: Sequence[Tile], settings: TileSettings, kernel: TileKernel | None, *, sinks: bool
) -> list[Tensor]:
    """Output and gradients by tiles of rows, in the order of the tokens."""
    q, k, v, sink_logits = tensors
    places = order()
    own_kernel = tile_kernel_for(q, v, settings.softcap, Kernels(tiles=kernel))
    plan = plan_tiles(tiles, settings.window, own_kernel, q.dtype)
    out = TiledAttention.apply(q[places], k[places], v[places], sink_logits if sinks else None, plan, settings)
    return gradients(out[places.argsort()], tensors[: 3 + sinks])


def dense(tensors: list[Tensor], settings: TileSettings, *, sinks: bool) -> list[Tensor]:
    q, k, v, sink_logits = tensors
    out = ReferenceAttention(BOUNDARIES)(
        0, q, Keys((k, v)), **vars(settings), sinks=sink_logits if sinks else None
    )  # fmt: skip
    return gradients(out, tensors[: 3 + sinks])


@pytest.mark.parametrize(
    ("name", "kind", "kv_heads", "sinks"), covering(KERNELS, KINDS, [1, 2, 4], [False, True], strength=3)
)
def test_tiles_are_a_dense_mask(name: str, kind: tuple[int | None, float | None], kv_heads: int, sinks: bool) -> None:
    kernel, (window, softcap) = KERNELS[name], kind
    settings = TileSettings(0.3, window, softcap)
    tensors = inputs(kv_heads)
    tiles = tiles_between(rows(), rows(), window)
    want = dense(tensors, settings, sinks=sinks)
    for got, expected in zip(tiled(tensors, tiles, settings, kernel, sinks=sinks), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    # Controls: a tile is missing; of one the keys stand a token later than they do.
    missing = tiled(tensors, tiles[1:], settings, kernel, sinks=sinks)
    assert not torch.allclose(missing[0], want[0])
    later = [tile._replace(distance=tile.distance - 1) if tile.distance > 0 else tile for tile in tiles]
    if window is not None and window < 20:
        assert not torch.allclose(tiled(tensors, later, settings, kernel, sinks=sinks)[0], want[0])


@pytest.mark.parametrize("name", ["uncut", *KERNELS])
@pytest.mark.parametrize("window", [None, 1, 4, 20])
def test_every_pair_is_in_one_tile_and_every_query_of_a_tile_sees_a_key(window: int | None, name: str) -> None:
    places, seen = order(), torch.zeros(60, 60, dtype=torch.int64)
    tiles = tiles_between(rows(), rows(), window)
    if name != "uncut":
        plan = plan_tiles(tiles, window, KERNELS[name])
        tiles = (*plan.products, *(tile for _, of_call in plan.calls for tile in of_call))
    for tile in tiles:
        hidden = tile.hidden(window, torch.device("cpu"))
        part = seen[tile.queries, tile.keys]
        visible = torch.ones_like(part) if hidden is None else (~hidden).long()
        assert visible.any(1).all() and visible.any(0).all() and (hidden is None or hidden.any())
        assert torch.equal(visible, seen_in(tile.call(window)))
        part += visible
    mask = ReferenceAttention(BOUNDARIES).mask(window, torch.device("cpu"))
    assert torch.equal(seen, mask[places][:, places].long())


def seen_in(call: TileCall) -> Tensor:
    """[B, L] int64, 1 where a query sees a key by `window_size`."""
    (queries,), (keys,) = call.queries, call.keys
    assert min(call.left, call.right) >= -1
    ahead = torch.arange(keys) - (torch.arange(queries) + keys - queries).unsqueeze(1)
    left, right = (10**6 if bound < 0 else bound for bound in (call.left, call.right))
    return ((ahead <= right) & (ahead >= -left)).long()


@pytest.mark.parametrize(("name", "softcap"), [("products", 2.0), ("cpu", None), ("varlen", None)])
def test_gradients_are_those_of_finite_differences(name: str, softcap: float | None) -> None:
    runs = (Run(0, 4, 0, 3), Run(0, 0, 3, 7))
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 4, 3), (7, 2, 3), (7, 2, 2), (4,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    settings = TileSettings(0.5, 5, softcap)
    plan = plan_tiles(tiles_between(runs, runs, 5), 5, KERNELS[name])
    assert torch.autograd.gradcheck(lambda *x: TiledAttention.apply(*x, plan, settings), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["products", "cpu"])
@pytest.mark.parametrize("window", [None, 11])
def test_narrow_types_are_as_exact_as_the_written_out_form(window: int | None, name: str, dtype: torch.dtype) -> None:
    settings = TileSettings(0.3, window, None)
    exact = dense(inputs(2), settings, sinks=True)
    limit = 1e-6 if dtype == torch.float32 else 0.02
    got = tiled(inputs(2, dtype), tiles_between(rows(), rows(), window), settings, KERNELS[name], sinks=True)
    for result, want in zip(got, exact, strict=True):
        assert result.dtype == dtype
        assert (result.double() - want).norm() / want.norm() < limit


def test_tiles_are_cut_to_the_most_rows() -> None:
    long = (Run(0, 0, 0, 100),)
    (whole,) = tiles_between(long, long, None)
    tiles = list(whole.cut(None))
    assert whole.shape == (100, 100) and all(tile.shape[0] <= 6 and tile.shape[1] <= 8 for tile in tiles)
    assert {tile.queries.start for tile in tiles} >= set(range(0, 100, 6))
    assert not list(itertools.chain(tiles_between(long, (Run(1, 0, 0, 100),), None)))  # another document


TWO = (Run(0, 0, 0, 20), Run(0, 20, 20, 50))
"""A document in two."""


def test_what_a_kernel_is_asked_to_compute() -> None:
    def shapes(window: int | None, kernel: TileKernel | None, dtype: torch.dtype = torch.float32) -> list[object]:
        plan = plan_tiles(tiles_between(TWO, TWO, window), window, kernel, dtype)
        return [(call.queries, call.keys, call.left, call.right) for call, _ in plan.calls]

    cpu, varlen = KERNELS["cpu"], KERNELS["varlen"]
    assert shapes(None, None) == []
    assert shapes(None, cpu) == [
        ((20,), (20,), -1, 0), ((30,), (30,), -1, 0), ((30,), (20,), -1, -1),
    ]  # fmt: skip
    # Those of one mask together.
    assert shapes(None, varlen) == [((20, 30), (20, 30), -1, 0), ((30,), (20,), -1, -1)]
    # The first 9 queries of the second run see the last 9 keys of the first: the last query one, the first query all.
    assert shapes(10, varlen) == [((20, 30), (20, 30), 9, 0), ((9,), (9,), 0, -1)]
    # Where a CPU needs a mask, tiles are small.
    assert all(max(call[0]) <= 6 and max(call[1]) <= 8 for call in shapes(10, cpu))  # type: ignore[index]


def test_short_tiles_in_half_precision_are_done_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "SMALLEST_NARROW_TILE", 600)
    tiles = tiles_between(TWO, TWO, None)
    by_dtype = {dtype: plan_tiles(tiles, None, CpuTiles(), dtype) for dtype in (torch.bfloat16, torch.float32)}
    narrow, wide = by_dtype[torch.bfloat16], by_dtype[torch.float32]
    assert [(call.queries, call.keys) for call, _ in narrow.calls] == [((30,), (30,)), ((30,), (20,))] and len(
        wide.calls
    ) == 3
    assert narrow.products and max(tile.queries.stop for tile in narrow.products) == 20 and not wide.products
    assert not narrow.is_empty and plan_tiles((), None, CpuTiles()).is_empty


@pytest.mark.parametrize(("dtype", "multiple"), [(torch.bfloat16, 64), (torch.float32, 1)])
def test_tiles_in_half_precision_have_few_shapes(
    dtype: torch.dtype, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    heads_first = attention_kernels._heads_first

    def recorded(x: Tensor) -> Tensor:
        lengths.append(len(x))
        return heads_first(x)

    monkeypatch.setattr(attention_kernels, "_heads_first", recorded)
    settings = TileSettings(0.3, 11, None)
    tiled(inputs(2, dtype), tiles_between(rows(), rows(), 11), settings, CpuTiles(), sinks=False)
    assert lengths and all(length % multiple == 0 for length in lengths)
    assert any(length % 64 for length in lengths) == (multiple == 1)  # control


def test_the_kernel_for_tiles_gets_what_it_takes_only() -> None:
    assert kernels_of(torch.device("cpu")).tiles == CpuTiles() and kernels_of(torch.device("meta")).tiles is None
    gpu = Kernels(tiles=VarlenTiles(print, print))
    for dtype, width, takes in (
        (torch.bfloat16, 64, True), (torch.float16, 256, True), (torch.float32, 64, False),
        (torch.bfloat16, 20, False), (torch.bfloat16, 264, False),
    ):  # fmt: skip
        q = torch.zeros(1, 1, width, dtype=dtype)
        assert (tile_kernel_for(q, q, None, gpu) is not None) == takes
        assert tile_kernel_for(q, q, 30.0, gpu) is None
        assert tile_kernel_for(q, q, None) == CpuTiles() and tile_kernel_for(q, q, 30.0) is None
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    assert tile_kernel_for(q, q[..., :40], None, gpu) and tile_kernel_for(q[..., :40], q, None, gpu)


def test_the_installed_operators_take_what_they_are_given() -> None:
    """Their arguments, checked by torch's implementation for tensors without storage."""
    kernel = VarlenTiles(torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    q, k, v, grad = (
        torch.empty(*s, 64, dtype=torch.bfloat16, device="meta") for s in ((30, 8), (50, 2), (50, 2), (30, 8))
    )
    for call in (TileCall((10, 20), (30, 20)), TileCall((10, 20), (30, 20), 7, 3)):
        out, lse = kernel.forward(q, k, v, call, 0.1)
        assert out.shape == q.shape and lse.shape == (30, 8) and lse.dtype == torch.float32
        gradients = kernel.backward(grad, q, k, v, out, lse, call, 0.1)
        assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def test_calls_are_as_few_as_there_are_masks() -> None:
    stub, kernels = stub_kernels()
    tiles = tiles_between(rows(), rows(), None)
    tiled(inputs(2), tiles, TileSettings(0.3, None, None), kernels.tiles, sinks=False)
    # The causal ones of a run and itself, and those of which all is seen: a query may have two of these.
    assert stub.calls == {"forward": 3, "backward": 3} and 7 < stub.tiles <= len(tiles)


def test_what_two_chunks_of_a_rank_see_of_another_rank_is_one_tile() -> None:
    """Chunks 1 and 2 of four, those of the last rank, see chunk 0; chunk 3 sees all: adjacent rows of another rank."""
    first, last = (Run(0, 0, 0, 10), Run(0, 30, 10, 20)), (Run(0, 10, 0, 10), Run(0, 20, 10, 20))
    for queries, keys, tile in ((last, first, Tile(slice(0, 20), slice(0, 10), 10)),
                                (first, last, Tile(slice(10, 20), slice(0, 20), 20))):  # fmt: skip
        between = tiles_between(queries, keys, None)
        plan = plan_tiles(between, None, CpuTiles())
        assert len(between) == 2 and [tiles for _, tiles in plan.calls] == [(tile,)]
        # With a window each has a mask of its own.
        assert len(plan_tiles(tiles_between(queries, keys, 25), 25, KERNELS["varlen"]).calls) == 2
