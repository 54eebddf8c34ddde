"""Frozen matrices of every format: the bits of `format.encode`, and of integers those of their plain definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from builders.kernel_count import Kernels
from builders.scaled_formats import FORMATS, OF_FILES
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics import four_bit, scaled_weight
from danlu.numerics.format import Format, encode
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.numerics.scaled_weight import ScaledWeight

Bits = Literal[4, 8]
LARGEST = {8: 127, 4: 7}
SHAPES = [(48, 256), (5, 100), (3, 33), (1, 129), (66, 1000), (7, 1)]
ALL = FORMATS | OF_FILES


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def integers(bits: Bits, group: int = 128) -> Format:
    return Format("int8" if bits == 8 else "int4", (1, group), narrow_range=True)


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
def test_integers_equal_their_definition(shape: tuple[int, int], dtype: torch.dtype, bits: Bits) -> None:
    matrix = normal(*shape, dtype=dtype)
    expected = definition(matrix, bits, 32)
    weight = ScaledWeight.quantize(matrix, integers(bits, 32))
    assert torch.equal(weight.dense(torch.float32), expected)
    assert torch.equal(weight.dense(), expected.to(dtype)) and weight.dense().dtype == dtype
    assert torch.equal(ScaledWeight.quantize(matrix.t().contiguous().t(), integers(bits, 32)).dense(), weight.dense())
    other = definition(matrix, bits, 64)
    assert shape[1] <= 32 or not torch.equal(expected, other)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(48, 256), (5, 100), (37, 33)])
def test_numbers_are_those_of_the_format(name: str, shape: tuple[int, int]) -> None:
    matrix, form = normal(*shape, dtype=torch.bfloat16), ALL[name]
    expected = encode(matrix, form)
    weight = ScaledWeight.quantize(matrix, form)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weight.dense(dtype), expected.decode(dtype))
    again = weight.scaled()
    assert torch.equal(again.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert again.codes.dtype == expected.codes.dtype and torch.equal(again.decode(), expected.decode())
    width = -(-shape[1] * form.bits // 8)
    assert weight.codes.shape == (shape[0], width) and weight.codes.dtype == torch.uint8
    # The control: the codes one bit on are other numbers.
    moved = weight.with_tensors({**dict(weight.named_buffers()), "codes": weight.codes << 1})
    assert not torch.equal(moved.dense(torch.float32), expected.decode())


@pytest.mark.parametrize("name", ["int4, zeros", "int3"])
def test_blocks_of_columns_that_are_not_neighbours(name: str) -> None:
    """GPTQ's act_order: encoded in another order of the inputs, each keeps its block's scale and zero."""
    matrix, form = normal(24, 96), ALL[name]
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    sorted_ = encode(matrix[:, order], form)
    back = order.argsort()
    groups = (torch.arange(96, dtype=torch.int32) // 32)[back]
    weight = ScaledWeight.of(replace(sorted_, codes=sorted_.codes[:, back], groups=groups), torch.float32)
    expected = sorted_.decode()[:, back]
    assert torch.equal(weight.dense(), expected) and torch.equal(weight.scaled().decode(), expected)
    assert torch.equal(weight.shard(slice(3, 20), slice(30, 61)).dense(), expected[3:20, 30:61])
    in_order = ScaledWeight.of(replace(weight.scaled(), groups=None), torch.float32)
    assert not torch.equal(in_order.dense(), expected)


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "fp8", "fp8 blocks", "mxfp4", "nvfp4", "int4, zeros"])
def test_a_gpu_unpacks_a_matrix_in_few_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On the meta device, which has the operations of a GPU and no numbers; by halves the bits are the same."""
    matrix, form = normal(66, 1000), ALL[name]
    weight = ScaledWeight.quantize(matrix, form)
    large = ScaledWeight.of(encode(torch.empty(4096, 14336, device="meta"), form), torch.bfloat16)
    large.dense(torch.bfloat16)  # makes the table of codes, which stays
    with Kernels(min_numel=5000) as kernels:
        large.dense(torch.bfloat16)
    assert 0 < len(kernels.names) <= {"int8": 10, "int4": 10, "int3": 30}.get(name, 15), kernels.names
    expected = weight.dense()
    monkeypatch.setattr(
        scaled_weight, "tile_size", lambda count, device: four_bit.tile_size(count, torch.device("meta"))
    )
    again = ScaledWeight.quantize(matrix, form)
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.dense(), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_half_a_step_at_most(bits: Bits) -> None:
    matrix = normal(64, 512)
    weight = ScaledWeight.quantize(matrix, integers(bits))
    steps = weight.scales.repeat_interleave(128, dim=1)
    error = (weight.dense() - matrix).abs()
    assert (error <= steps * 0.5001).all() and (error > steps * 0.49).any()


@pytest.mark.parametrize("name", ALL)
def test_zeros_and_numbers_too_small_for_a_scale(name: str) -> None:
    matrix = torch.zeros(3, 200)
    matrix[1] = 1e-45
    assert float(ScaledWeight.quantize(matrix, ALL[name]).dense().abs().max()) <= 1e-37


@pytest.mark.parametrize(
    ("name", "bits"), [("int8", 9), ("int4", 5), ("int3", 4), ("mxfp4", 4.25), ("nvfp4", 4.5 + 32 / (256 * 512))]
)
def test_bits_a_number(name: str, bits: float) -> None:
    weight = ScaledWeight.quantize(normal(256, 512), ALL[name])
    assert 8 * weight.stored_bytes() / (256 * 512) == bits
    assert repr(weight) == f"ScaledWeight({ALL[name].element}, 512 -> 256, {bits:.3f} bits a number)"


def test_more_bits_and_better_codes_mean_less_error() -> None:
    matrix = normal(256, 512)
    weights = {name: ScaledWeight.quantize(matrix, form) for name, form in FORMATS.items()}
    weights["nf4"] = FourBitWeight.quantize(matrix)  # type: ignore[assignment]
    errors = {name: float((weight.dense() - matrix).abs().mean()) for name, weight in weights.items()}
    assert errors["int8"] < errors["nf4"] / 10 and errors["int8"] < errors["fp8"] < errors["int4"]
    assert errors["nvfp4"] < errors["mxfp4"] < errors["int3"] < errors["int2"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite(value: float, name: str) -> None:
    matrix = normal(64, 2000)
    matrix[63, 1999] = value
    with pytest.raises(ModelError, match="up_proj cannot be quantized: it holds NaN or infinite values"):
        ScaledWeight.quantize(matrix, ALL[name], where="up_proj")


def test_what_is_no_matrix_of_weights() -> None:
    with pytest.raises(ModelError, match="it holds int8"):
        ScaledWeight.quantize(torch.zeros(8, 64, dtype=torch.int8), integers(8))
    with pytest.raises(ModelError, match=r"its shape is \[64\]"):
        ScaledWeight.quantize(torch.zeros(64), integers(8))
