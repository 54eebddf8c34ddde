"""Packed weights on the device, against their definition and the same on the CPU."""

from __future__ import annotations

import pytest
import torch
from builders.scaled_formats import FORMATS, OF_FILES

from danlu.numerics.four_bit import codebook
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.numerics.scaled_weight import ScaledWeight

SHAPES = [(3, 21), (64, 64), (100, 1000), (257, 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_the_nearest_level_of_their_block(
    device: torch.device, shape: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = FourBitWeight.quantize(weight.to(device), kind=kind, double=False)  # type: ignore[arg-type]
    found = packed.dense(torch.float32).cpu().double()
    flat = weight.double().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    largest = padded.abs().amax(1, keepdim=True).clamp_min(1e-30)
    levels = codebook(kind).double()  # type: ignore[arg-type]
    nearest = ((padded / largest).unsqueeze(-1) - levels).abs().amin(-1) * largest
    error = (found.flatten() - flat).abs()
    # No further from the number than the nearest level is, but for the rounding of the quotient.
    assert bool((error <= nearest.flatten()[: len(flat)] + 1e-5).all())
    assert float(error.mean()) > 1e-3  # control: it is rounded


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_device_unpacks_the_bits_of_the_cpu(device: torch.device, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for one in (
        FourBitWeight.quantize(weight),
        *(ScaledWeight.quantize(weight, form) for form in (FORMATS | OF_FILES).values()),
    ):
        here = one.dense(torch.bfloat16)
        assert torch.equal(one.to(device).dense(torch.bfloat16).cpu(), here)


def test_products_with_a_packed_weight(device: torch.device) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    packed = FourBitWeight.quantize(weight.to(device))
    x = torch.randn(40, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = packed.product(x)
    exact = x.detach().double() @ packed.dense(torch.bfloat16).double().t()
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-1)
    y.sum().backward()
    wanted = packed.dense(torch.bfloat16).double().sum(0).expand_as(x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), wanted, rtol=2e-2, atol=2e-1)
    assert not torch.allclose(x.grad.double(), 2 * wanted, rtol=2e-2, atol=2e-1)
