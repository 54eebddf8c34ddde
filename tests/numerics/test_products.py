"""Products of matrices in few bits: their definition, and the layouts that Hopper's kernels ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from danlu.numerics import products
from danlu.numerics.format import WHOLE, Format, Scaled, encode
from danlu.numerics.products import kernel_recipes, product, scaled_mm

TILE = Format("e4m3", (1, 128), "power-of-two")
SQUARE = Format("e4m3", (128, 128), "power-of-two")
ROW = Format("e4m3", (1, WHOLE), "power-of-two")
TENSOR, GRADIENT = Format("e4m3", (WHOLE, WHOLE)), Format("e5m2", (WHOLE, WHOLE))
MX = Format("e4m3", (1, 32), "e8m0", rounding="floor")

PAIRS = [
    (TILE, SQUARE, ("BlockWise1x128", "BlockWise128x128")),
    (TILE, TILE, ("BlockWise1x128", "BlockWise1x128")),
    (ROW, ROW, ("RowWise", "RowWise")),
    (TENSOR, TENSOR, ("TensorWise", "TensorWise")),
    (GRADIENT, TENSOR, ("TensorWise", "TensorWise")),
    (GRADIENT, GRADIENT, None),
    (MX, MX, None),
]


def on_meta(scaled: Scaled) -> Scaled:
    return replace(scaled, codes=scaled.codes.to("meta"), scales=scaled.scales.to("meta"))


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="an older torch, where products are of decoded numbers")
@pytest.mark.parametrize(("of_a", "of_b", "recipes"), PAIRS)
@pytest.mark.parametrize("sizes", [(256, 384, 512), (131, 256, 176), (3, 128, 640)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_meta_device_accepts_the_layouts_of_scales(
    of_a: Format, of_b: Format, recipes: tuple[str, str] | None, sizes: tuple[int, int, int], turned: bool
) -> None:
    """As they are encoded, or as transposed ones, which weights' gradients have."""
    rows, columns, contracted = sizes

    def scaled(form: Format, length: int) -> Scaled:
        if turned:
            return encode(torch.ones(contracted, length), replace(form, block=form.block[::-1])).transposed()
        return encode(torch.ones(length, contracted), form)

    a, b = on_meta(scaled(of_a, rows)), on_meta(scaled(of_b, columns))
    assert kernel_recipes(a, b) == recipes
    if recipes is not None:
        y = scaled_mm(a, b, recipes, torch.bfloat16)
        assert y.shape == (rows, columns) and y.dtype == torch.bfloat16 and y.is_meta


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="an older torch, where products are of decoded numbers")
def test_widths_without_a_kernel_are_decoded() -> None:
    """Blocks of 128 x 128 that end within the matrix, and rows that do not begin at multiples of 16 bytes."""
    a = encode(torch.ones(8, 256), TILE)
    assert kernel_recipes(a, encode(torch.ones(272, 256), SQUARE)) is None
    assert kernel_recipes(a, encode(torch.ones(24, 256), TILE)) is None
    assert kernel_recipes(a, encode(torch.ones(272, 256), TILE)) is not None


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="an older torch, where products are of decoded numbers")
def test_the_meta_device_refuses_scales_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    a, b = on_meta(encode(torch.ones(256, 512), TILE)), on_meta(encode(torch.ones(384, 512), SQUARE))
    monkeypatch.setattr(products, "_kernel_scales", lambda factor, *_, **__: factor.wide_scales())
    with pytest.raises((RuntimeError, ValueError), match="scale a must have shape"):
        scaled_mm(a, b, ("BlockWise1x128", "BlockWise128x128"), torch.bfloat16)


def test_factors_that_are_filled_up_keep_their_numbers() -> None:
    """The codes and scales that a kernel is given, multiplied as it does, are the product."""
    generator = torch.Generator().manual_seed(0)
    a = encode(torch.randn(131, 176, generator=generator), TILE)
    b = encode(torch.randn(272, 176, generator=generator), SQUARE)
    codes = [products._filled(each.codes, 80, rows).float() for each, rows in ((a, 1), (b, 0))]
    of_a = products._kernel_scales(a, "BlockWise1x128", first=True, more=1)  # [132, 2]
    of_b = products._kernel_scales(b, "BlockWise128x128", first=False, more=0)  # [4, 3]
    y = sum(
        codes[0][:, k : k + 128]
        @ codes[1][:, k : k + 128].t()
        * of_a[:, k // 128, None]
        * of_b[k // 128].repeat_interleave(128)[:272]
        for k in (0, 128)
    )
    torch.testing.assert_close(y[:131], product(a, b, torch.float32))  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_a_sum_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two decode exactly into bfloat16, so either type of factors gives it; other scales do not."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 256, generator=generator), torch.randn(24, 256, generator=generator)
    for of_a, of_b in ((TILE, SQUARE), (TENSOR, TENSOR)):
        a, b = encode(x, of_a), encode(weight, of_b)
        exact = a.decode(torch.float64) @ b.decode(torch.float64).t()
        for fast in (False, True):
            monkeypatch.setattr(products, "_has_fast_bfloat16", lambda _, fast=fast: fast)
            y = product(a, b, dtype)
            assert y.dtype == dtype
            limit = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
            assert float((y.double() - exact).abs().max() / exact.abs().max()) < limit
    assert not torch.equal(a.decode(torch.bfloat16).float(), a.decode())  # control: float32 scales
