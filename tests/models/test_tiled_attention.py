"""Attention in tiles of chunks that lie in any order against one dense mask, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders.reference_attention import ReferenceAttention
from torch import Tensor

from danlu.layer_types import Keys
from danlu.models import tiled_attention
from danlu.models.tiled_attention import Tile, TiledAttention, TileSettings, tiles_between
from danlu.types import Run

BOUNDARIES = (0, 5, 6, 37, 60)
CHUNKS = ((40, 60), (6, 11), (0, 5), (21, 37), (37, 40), (5, 6), (11, 21))
"""Tokens of the pack as they lie in rows: of one document in several places, a later one before an earlier one."""
KINDS = [(None, None), (3, None), (11, None), (None, 2.0), (7, 1.0), (100, None)]
"""(window, softcap)"""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_attention, "QUERY_ROWS", 6)
    monkeypatch.setattr(tiled_attention, "KEY_ROWS", 8)


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


def tiled(tensors: list[Tensor], tiles: tuple[Tile, ...], settings: TileSettings, *, sinks: bool) -> list[Tensor]:
    """Output and gradients by tiles of rows, in the order of the tokens."""
    q, k, v, sink_logits = tensors
    places = order()
    out = TiledAttention.apply(q[places], k[places], v[places], sink_logits if sinks else None, tiles, settings)
    return gradients(out[places.argsort()], tensors[: 3 + sinks])


def dense(tensors: list[Tensor], settings: TileSettings, *, sinks: bool) -> list[Tensor]:
    q, k, v, sink_logits = tensors
    out = ReferenceAttention(BOUNDARIES)(
        0, q, Keys((k, v)), **vars(settings), sinks=sink_logits if sinks else None
    )  # fmt: skip
    return gradients(out, tensors[: 3 + sinks])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), KINDS)
def test_tiles_are_a_dense_mask(window: int | None, softcap: float | None, kv_heads: int, sinks: bool) -> None:
    settings = TileSettings(0.3, window, softcap)
    tensors = inputs(kv_heads)
    tiles = tiles_between(rows(), rows(), window)
    want = dense(tensors, settings, sinks=sinks)
    for got, expected in zip(tiled(tensors, tiles, settings, sinks=sinks), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    # Controls: a tile is missing; of one the keys stand a token later than they do.
    missing = tiled(tensors, tiles[1:], settings, sinks=sinks)
    assert not torch.allclose(missing[0], want[0])
    later = [tile._replace(distance=tile.distance - 1) if tile.distance > 0 else tile for tile in tiles]
    if window is not None and window < 20:
        assert not torch.allclose(tiled(tensors, tuple(later), settings, sinks=sinks)[0], want[0])


def test_every_pair_is_in_one_tile_and_no_tile_sees_nothing() -> None:
    places = order()
    for window in (None, 1, 4, 20):
        seen = torch.zeros(60, 60, dtype=torch.int64)
        for tile in tiles_between(rows(), rows(), window):
            hidden = tile.hidden(window, torch.device("cpu"))
            part = seen[tile.queries, tile.keys]
            visible = torch.ones_like(part) if hidden is None else (~hidden).long()
            assert visible.any() and (hidden is None or hidden.any())
            part += visible
        mask = ReferenceAttention(BOUNDARIES).mask(window, torch.device("cpu"))
        assert torch.equal(seen, mask[places][:, places].long())


def test_gradients_are_those_of_finite_differences() -> None:
    runs = (Run(0, 4, 0, 3), Run(0, 0, 3, 7))
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 4, 3), (7, 2, 3), (7, 2, 2), (4,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    settings = TileSettings(0.5, 5, 2.0)
    tiles = tiles_between(runs, runs, 5)
    assert torch.autograd.gradcheck(lambda *x: TiledAttention.apply(*x, tiles, settings), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_as_exact_as_the_written_out_form(dtype: torch.dtype) -> None:
    settings = TileSettings(0.3, None, None)
    exact = dense(inputs(2), settings, sinks=True)
    limit = 1e-6 if dtype == torch.float32 else 0.02
    got = tiled(inputs(2, dtype), tiles_between(rows(), rows(), None), settings, sinks=True)
    for result, want in zip(got, exact, strict=True):
        assert result.dtype == dtype
        assert (result.double() - want).norm() / want.norm() < limit


def test_tiles_are_cut_to_the_most_rows() -> None:
    long = (Run(0, 0, 0, 100),)
    tiles = tiles_between(long, long, None)
    assert all(tile.queries.stop - tile.queries.start <= 6 and tile.keys.stop - tile.keys.start <= 8 for tile in tiles)
    assert {tile.queries.start for tile in tiles} == set(range(0, 100, 6))
    assert not list(itertools.chain(tiles_between(long, (Run(1, 0, 0, 100),), None)))  # another document
