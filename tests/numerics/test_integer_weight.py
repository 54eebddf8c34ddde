"""Products of 8-bit integers with tokens that are rounded when they come: W8A8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from danlu.numerics.format import WHOLE, Format, encode
from danlu.numerics.integer_weight import IntegerWeight, multiplies_integers
from danlu.numerics.quantized_weight import StackedWeight

INPUTS = 1100
"""More terms than float32 adds up exactly."""
ROWS = Format("int8", (1, WHOLE), "bfloat16")


def layer(seed: int = 0) -> tuple[Tensor, IntegerWeight]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, INPUTS, generator=generator) * torch.logspace(-2, 3, 6).unsqueeze(1)
    return x, IntegerWeight.of(encode(torch.randn(24, INPUTS, generator=generator), ROWS), torch.float32)


def test_the_product_is_that_of_the_rounded_tokens() -> None:
    """In float64, with activations as compressed-tensors rounds them; the control leaves them as they are."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    x, weight = layer()
    x[2, 5] = x[2].abs().max()  # a largest number whose code is 128 steps, one past the last
    arguments = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scales, zeros = calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), arguments)
    rounded = fake_quantize(x, scales, zeros, arguments)
    wanted = rounded.double() @ weight.dense().double().t()
    y = weight.product(x)
    assert ((y - wanted).norm(dim=1) / wanted.norm(dim=1)).max() < 1e-6
    unrounded = x.double() @ weight.dense().double().t()
    assert ((y - unrounded).norm(dim=1) / unrounded.norm(dim=1)).min() > 1e-3


def test_a_token_does_not_hang_on_its_neighbours_and_experts_on_each_other() -> None:
    x, first = layer()
    _, second = layer(1)
    whole = first.product(x)
    assert torch.equal(torch.cat([first.product(row) for row in x.split(1)]), whole)
    stack, counts = StackedWeight([first, second, first]), torch.tensor([2, 0, 4])
    assert torch.equal(stack.rounded_product(x, counts), torch.cat([whole[:2], first.product(x[2:])]))
    dense = StackedWeight([super(IntegerWeight, first).shard(slice(0, 24), slice(0, INPUTS))])
    assert dense.rounded_product(x, torch.tensor([6])) is None  # control: another kind of weight


def test_weights_that_are_no_integers_by_rows_are_left_as_they_are() -> None:
    matrix = torch.randn(8, 64)
    assert multiplies_integers(encode(matrix, ROWS))
    for form in (Format("int8", (1, 32)), Format("int8", (1, WHOLE), zero="integer"), Format("int4", (1, WHOLE))):
        assert not multiplies_integers(encode(matrix, form))
