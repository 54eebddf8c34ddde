"""Products with weights that are encoded once: integers against exact sums, FP8 against training's products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from danlu.numerics import encoded_products
from danlu.numerics.arithmetic import RECIPES, Fp8Arithmetic
from danlu.numerics.encoded_products import EXACT_TERMS, Fp8Product, Int8Product

TERMS = 5 * EXACT_TERMS + 333


def factors(rows: int = 9, outputs: int = 7, terms: int = TERMS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Of one sign, so that sums leave the integers that float32 holds.
    return torch.rand(rows, terms, generator=generator) + 0.5, torch.rand(outputs, terms, generator=generator) + 0.5


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """The product of nearest integers with sums of 64 bits, rounded to float32 once before the scales."""
    scales = [(each.abs().amax(1, keepdim=True) / 127).float() for each in (x, weight)]
    codes = [(each / scale).round().long() for each, scale in zip((x, weight), scales, strict=True)]
    sums = codes[0] @ codes[1].t()
    assert int(sums.max()) > 2**24
    return sums.float() * scales[0] * scales[1].t()


def test_integers_are_added_up_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = factors()
    expected = exact(x, weight)
    assert Int8Product([weight])(x).equal(expected)
    assert Int8Product([weight[:3], weight[3:]])(x.bfloat16()).equal(exact(x.bfloat16().float(), weight).bfloat16())
    monkeypatch.setattr(encoded_products, "_has_integer_products", lambda: False)
    assert Int8Product([weight])(x).equal(expected)
    monkeypatch.setattr(encoded_products, "EXACT_TERMS", TERMS)
    assert not Int8Product([weight])(x).equal(expected)


@pytest.mark.parametrize("precision", ["int8", "tile", "row", "mxfp8"])
def test_a_row_does_not_hang_on_its_neighbours(precision: str) -> None:
    x, weight = factors(terms=300)
    x[3] *= 1e4
    product = Int8Product([weight]) if precision == "int8" else Fp8Product([weight], precision)
    whole = product(x)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x])
    if precision == "int8":
        assert whole.equal(alone)
    else:  # of numbers that are the same, in another order
        torch.testing.assert_close(whole, alone, rtol=1e-5, atol=0)
    with_one_scale = Fp8Product([weight], "tensor")
    changed = torch.cat([with_one_scale(row.unsqueeze(0)) for row in x])
    assert ((with_one_scale(x) - changed)[0] / changed[0]).abs().max() > 1e-3, "the control hangs on them"


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_the_product_of_training(recipe: str) -> None:
    x, weight = factors(rows=5, outputs=200, terms=300)
    (expected, other), _ = Fp8Arithmetic(recipe).forward(x, (weight, -2 * weight[:77]))
    y = Fp8Product([weight, -2 * weight[:77]], recipe)(x)
    assert y.equal(torch.cat((expected, other), dim=1))
    assert not y[:, :200].equal(x @ weight.t())


def test_numbers_that_are_not_finite_stay_so() -> None:
    x, weight = factors(terms=300)
    x[1, 5] = torch.inf
    for product in (Int8Product([weight]), Fp8Product([weight], "tile")):
        finite = product(x).isfinite().all(dim=1)
        assert not finite[1] and finite[0]
    assert Int8Product([weight])(torch.zeros(2, 300)).equal(torch.zeros(2, 7))
