"""Products of few rows are those of torch up to rounding, and copies of weights are never stale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from danlu.models import ops
from danlu.models.few_rows import LEAST_WEIGHT, MOST_ROWS, FewRowProducts, active_products


@pytest.mark.parametrize("rows", [1, 2, 7, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("shape", [(300, 128), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_biases(rows, shape, dtype):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((rows, shape[1]), shape, shape[0]))
    assert weight.numel() > LEAST_WEIGHT or shape == (8, 4)
    with FewRowProducts().active(), torch.inference_mode():
        y = ops.linear(x, weight, bias)
    assert y.is_contiguous() and y.dtype == dtype
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-4)


def test_products_are_the_usual_ones_outside():
    x, weight = torch.randn(4, 512), torch.randn(1024, 512)
    with FewRowProducts().active():
        assert active_products() is not None
    assert active_products() is None
    assert torch.equal(ops.linear(x, weight), F.linear(x, weight))


def test_a_copy_follows_its_weight():
    weight = torch.nn.Parameter(torch.randn(64, 32))
    x = torch.randn(2, 32).bfloat16()
    products = FewRowProducts()

    def product():
        with products.active(), torch.inference_mode():
            return ops.linear(x, weight)

    first = product()
    copy = products._casts[id(weight)][2]
    product()
    assert products._casts[id(weight)][2] is copy
    with torch.no_grad():
        weight.mul_(2)  # as an optimizer does
    assert torch.equal(product(), 2 * first)
    assert not torch.equal(product(), first)
    products.clear()
    assert not products._casts
