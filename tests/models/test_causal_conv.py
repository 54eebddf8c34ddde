"""The causal convolution over packed tokens against the sum over each token's path."""

from __future__ import annotations

import pytest
import torch
from builders.delta_recurrence import convolution, paths

from danlu.core.types import Branch
from danlu.models.gated_delta_net import causal_conv, causal_conv_step, last_inputs
from danlu.models.recurrent_order import RecurrentOrder

PACKS = {
    "one": ((0, 9), ()),
    "short": ((0, 1, 3, 6, 20), ()),
    "tree": ((0, 9, 12), (Branch(-1, 0, 2), Branch(0, 2, 3), Branch(1, 3, 7), Branch(1, 7, 9), Branch(-1, 9, 12))),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("pack", PACKS)
def test_values_and_gradients_are_those_of_each_path(pack: str) -> None:
    boundaries, trees = PACKS[pack]
    x, weight = draw(boundaries[-1], 5).requires_grad_(), draw(5, 1, 4).requires_grad_()
    own_x, own_weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = causal_conv(x, weight, RecurrentOrder(boundaries, trees))
    expected = convolution(own_x, own_weight, paths(boundaries, trees))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    weights = draw(boundaries[-1], 5) + 1
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, own_x.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(weight.grad, own_weight.grad, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(causal_conv(x, weight, RecurrentOrder(boundaries, trees)), y, rtol=0, atol=0)
        joined = causal_conv(x, weight, RecurrentOrder((0, boundaries[-1])))
    assert pack == "one" or not torch.allclose(joined, y)


def test_a_run_goes_on_where_another_ended() -> None:
    x, weight = draw(11, 5), draw(5, 1, 4)
    with torch.no_grad():
        whole = causal_conv(x, weight, RecurrentOrder((0, 11)))
        nothing = torch.zeros(1, 3, 5, dtype=torch.float64)
        parts, before, start = [], nothing, 0
        for stop in (2, 8, 10):
            order = RecurrentOrder((0, stop - start))
            parts.append(causal_conv(x[start:stop], weight, order, before))
            before = last_inputs(x[start:stop], order, before)
            start = stop
        parts.append(causal_conv_step(x[10:], weight, before))
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-13)
        torch.testing.assert_close(before[0], x[7:10], rtol=0, atol=0)


def test_sums_of_bfloat16_are_made_in_float32() -> None:
    x, weight = draw(20, 64).bfloat16(), draw(64, 1, 4).bfloat16()
    y = causal_conv(x, weight, RecurrentOrder((0, 20)))
    exact = convolution(x.double(), weight.double(), paths((0, 20)))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16()) or ((y.double() - exact).abs() <= exact.abs() * 2**-8).all()
