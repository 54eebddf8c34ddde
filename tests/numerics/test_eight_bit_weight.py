"""Products in 8 bits, of integers and of FP8, with tokens that are rounded when they come: W8A8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from danlu.numerics.eight_bit_weight import Fp8Weight, IntegerWeight, weight_for_eight_bits
from danlu.numerics.format import WHOLE, Format, encode
from danlu.numerics.quantized_weight import StackedWeight
from danlu.numerics.scaled_weight import ScaledWeight

INPUTS = 1100
"""More terms than float32 adds up exactly."""
ROWS, FP8_ROWS = (Format(element, (1, WHOLE), "bfloat16") for element in ("int8", "e4m3"))  # type: ignore[arg-type]


def layer(seed: int = 0, form: Format = ROWS) -> tuple[Tensor, IntegerWeight | Fp8Weight]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, INPUTS, generator=generator) * torch.logspace(-2, 3, 6).unsqueeze(1)
    scaled = encode(torch.randn(24, INPUTS, generator=generator), form)
    kind = weight_for_eight_bits(scaled)
    assert kind is (IntegerWeight if form == ROWS else Fp8Weight)
    return x, kind.of(scaled, torch.float32)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["int", "float"])
def test_the_product_is_that_of_the_rounded_tokens(kind: str) -> None:
    """In float64, with activations as compressed-tensors rounds them; the control leaves them as they are."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    x, weight = layer(form=ROWS if kind == "int" else FP8_ROWS)
    x[2, 5] = x[2].abs().max()  # a largest number whose code is 128 steps, one past the last
    arguments = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
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
    dense = StackedWeight([ScaledWeight.of(first.scaled(), torch.float32)])
    assert dense.rounded_product(x, torch.tensor([6])) is None  # control: another kind of weight


def test_weights_in_other_formats_are_left_as_they_are() -> None:
    matrix = torch.randn(8, 64)
    for form in (
        *(Format("int8", (1, 32)), Format("int8", (1, WHOLE), zero="integer"), Format("int4", (1, WHOLE))),
        *(Format("e4m3", (1, 32)), Format("e5m2", (1, WHOLE)), Format("int8", (WHOLE, WHOLE))),
    ):
        assert weight_for_eight_bits(encode(matrix, form)) is None
    assert weight_for_eight_bits(encode(matrix, Format("e4m3", (WHOLE, WHOLE)))) is Fp8Weight
