from __future__ import annotations

import pytest
import torch
from builders.kernel_count import Kernels
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics import four_bit, integer_weight
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.numerics.integer_weight import Bits, IntegerWeight

LARGEST = {8: 127, 4: 7}
SHAPES = [(48, 256), (5, 100), (3, 33), (1, 129), (66, 1000), (7, 1)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def definition(matrix: Tensor, bits: Bits, group: int) -> Tensor:
    """Group by group and output by output, as the method is described."""
    out = torch.empty(matrix.shape)
    for output, row in enumerate(matrix.float()):
        for start in range(0, len(row), group):
            numbers = row[start : start + group]
            scale = numbers.abs().max() / LARGEST[bits]
            out[output, start : start + group] = (numbers / scale).round() * scale if scale > 0 else 0
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_its_definition(shape: tuple[int, int], dtype: torch.dtype, bits: Bits) -> None:
    matrix = normal(*shape, dtype=dtype)
    expected = definition(matrix, bits, 32)
    weight = IntegerWeight.quantize(matrix, bits, group=32)
    assert torch.equal(weight.dense(torch.float32), expected)
    assert torch.equal(weight.dense(), expected.to(dtype)) and weight.dense().dtype == dtype
    assert torch.equal(IntegerWeight.quantize(matrix.t().contiguous().t(), bits, group=32).dense(), weight.dense())
    other = definition(matrix, bits, 64)
    assert shape[1] <= 32 or not torch.equal(expected, other)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_gpu_unpacks_a_matrix_in_ten_kernels(monkeypatch: pytest.MonkeyPatch, bits: Bits) -> None:
    """On the meta device, which has the operations of a GPU and no numbers; by halves the bits are the same."""
    matrix = normal(66, 1000)
    weight = IntegerWeight.quantize(matrix, bits)
    large = IntegerWeight.quantize(matrix, bits).to("meta")
    large.shape = (4096, 14336)
    large.codes = torch.empty(4096, 14336 * bits // 8, dtype=weight.codes.dtype, device="meta")
    large.scales = torch.empty(4096, 112, device="meta")
    with Kernels(min_numel=1000) as kernels:
        large.dense(torch.bfloat16)
    assert 0 < len(kernels.names) <= 10, kernels.names
    expected = weight.dense()
    monkeypatch.setattr(
        integer_weight, "tile_size", lambda count, device: four_bit.tile_size(count, torch.device("meta"))
    )
    again = IntegerWeight.quantize(matrix, bits)
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.dense(), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_half_a_step_at_most(bits: Bits) -> None:
    matrix = normal(64, 512)
    weight = IntegerWeight.quantize(matrix, bits)
    steps = weight.scales.repeat_interleave(128, dim=1)
    error = (weight.dense() - matrix).abs()
    assert (error <= steps * 0.5001).all() and (error > steps * 0.49).any()


def test_zeros_and_numbers_too_small_for_a_scale() -> None:
    matrix = torch.zeros(3, 200)
    matrix[1] = 1e-45
    for bits in (8, 4):
        assert torch.equal(IntegerWeight.quantize(matrix, bits).dense(), torch.zeros(3, 200))


@pytest.mark.parametrize(("bits", "group", "expected"), [(8, 128, 8.25), (4, 128, 4.25), (4, 32, 5.0)])
def test_bits_a_number(bits: Bits, group: int, expected: float) -> None:
    weight = IntegerWeight.quantize(normal(256, 512), bits, group=group)
    assert 8 * weight.stored_bytes() / (256 * 512) == expected
    assert repr(weight) == f"IntegerWeight(int{bits}, 512 -> 256, {expected:.3f} bits a number)"


def test_more_bits_and_better_codes_mean_less_error() -> None:
    matrix = normal(256, 512)
    errors = [
        (weight.dense() - matrix).abs().mean()
        for weight in (
            IntegerWeight.quantize(matrix, 8),
            FourBitWeight.quantize(matrix),
            IntegerWeight.quantize(matrix, 4),
        )
    ]
    assert errors[0] < errors[1] / 10 and errors[1] < errors[2]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite(value: float, bits: Bits) -> None:
    matrix = normal(64, 2000)
    matrix[63, 1999] = value
    with pytest.raises(ModelError, match="up_proj cannot be quantized: it holds NaN or infinite values"):
        IntegerWeight.quantize(matrix, bits, where="up_proj")


def test_what_is_no_matrix_of_weights() -> None:
    with pytest.raises(ModelError, match="it holds int8"):
        IntegerWeight.quantize(torch.zeros(8, 64, dtype=torch.int8), 8)
    with pytest.raises(ModelError, match=r"its shape is \[64\]"):
        IntegerWeight.quantize(torch.zeros(64), 8)
