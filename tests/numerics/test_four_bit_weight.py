from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.bitsandbytes_config import KINDS, Kind
from danlu.numerics.four_bit_weight import FourBitWeight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def functional() -> ModuleType:
    import bitsandbytes.functional  # seconds: not when tests are collected

    return bitsandbytes.functional


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
# Rows of whole blocks: for other rows bitsandbytes' CPU kernel is wrong, see test_four_bit.
@pytest.mark.parametrize("shape", [(4, 64), (17, 192), (100, 704)])
def test_equals_bitsandbytes(
    functional: ModuleType, shape: tuple[int, int], dtype: torch.dtype, kind: Kind, double: bool
) -> None:
    matrix = normal(*shape, dtype=dtype)
    weight = FourBitWeight.quantize(matrix, kind=kind, double=double)
    codes, state = functional.quantize_4bit(matrix, quant_type=kind, compress_statistics=double)
    assert torch.equal(weight.codes, codes) and torch.equal(weight.absmax, state.absmax)
    if double:
        assert torch.equal(weight.nested_absmax, state.state2.absmax)
        assert torch.equal(weight.nested_offset, state.offset)
    assert torch.equal(weight.dense(), functional.dequantize_4bit(codes, state))
    assert weight.dense().dtype == dtype and weight.dense().shape == shape
    wide = weight.dense(torch.float32)
    assert torch.equal(wide.to(dtype), weight.dense()) and torch.equal(wide.double(), weight.dense(torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_double_quantization_changes_what_comes_back(kind: Kind) -> None:
    matrix = normal(64, 128)
    once, twice = (FourBitWeight.quantize(matrix, kind=kind, double=double) for double in (False, True))
    assert torch.equal(once.codes, twice.codes) and not torch.equal(once.dense(), twice.dense())
    error = [(weight.dense() - matrix).abs().mean() / matrix.abs().mean() for weight in (once, twice)]
    assert error[0] < error[1] < 1.02 * error[0]


def test_every_call_makes_a_matrix_of_its_own() -> None:
    weight = FourBitWeight.quantize(normal(8, 64))
    first = weight.dense()
    expected = first.clone()
    first.zero_()
    weight.product(normal(1, 64))
    assert torch.equal(weight.dense(), expected)


@pytest.mark.parametrize(("block", "double", "bits"), [(64, False, 4.5), (64, True, 4.127), (128, True, 4.0635)])
def test_bits_a_number(block: int, double: bool, bits: float) -> None:
    weight = FourBitWeight.quantize(normal(1024, 1024), block=block, double=double)
    assert 8 * weight.stored_bytes() / 1024**2 == pytest.approx(bits, abs=2e-4)
    assert weight.stored_bytes() == sum(buffer.nbytes for buffer in weight.buffers())
    assert repr(weight).startswith("FourBitWeight(nf4, 1024 -> 1024, 4.")


def test_a_deep_copy_and_a_state_dict_are_the_same_weight() -> None:
    weight, other = FourBitWeight.quantize(normal(8, 96)), FourBitWeight.quantize(normal(8, 96) * 2)
    assert torch.equal(copy.deepcopy(weight).dense(), weight.dense())
    assert not torch.equal(other.dense(), weight.dense())
    other.load_state_dict(weight.state_dict())
    assert torch.equal(other.dense(), weight.dense())


def test_the_packed_matrix_is_left_alone() -> None:
    matrix = torch.nn.Parameter(normal(8, 96))
    before = matrix.detach().clone()
    weight = FourBitWeight.quantize(matrix)
    assert torch.equal(matrix, before) and not weight.dense().requires_grad


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 5000, 12286])
def test_a_weight_that_is_not_finite(value: float, place: int) -> None:
    matrix = normal(96, 128)
    matrix.view(-1)[place] = value
    with pytest.raises(ModelError, match="layer 3 cannot be quantized: it holds NaN or infinite values"):
        FourBitWeight.quantize(matrix, where="layer 3")
    short = normal(3, 33)
    short[2, 32] = value  # in a short last block
    with pytest.raises(ModelError, match="NaN or infinite"):
        FourBitWeight.quantize(short)


def test_what_is_no_matrix_of_weights() -> None:
    with pytest.raises(ModelError, match="a matrix cannot be quantized: it holds uint8, not float32"):
        FourBitWeight.quantize(torch.zeros(8, 64, dtype=torch.uint8))
    with pytest.raises(ModelError, match="it holds float64"):
        FourBitWeight.quantize(torch.zeros(8, 64, dtype=torch.float64))
    for shape in ((64,), (2, 3, 64), (0, 64)):
        with pytest.raises(ModelError, match=r"its shape is \[.*\], not \[outputs, inputs\]"):
            FourBitWeight.quantize(torch.zeros(*shape))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("width", "rows"), [(32, (32, 16, 16)), (64, (512, 256, 1)), (7, (64, 3))])
def test_parts_hold_the_numbers_of_the_whole(width: int, rows: tuple[int, ...], double: bool) -> None:
    whole = FourBitWeight.quantize(normal(sum(rows), width), double=double)
    parts = whole.split(rows)
    assert [part.shape for part in parts] == [(count, width) for count in rows]
    assert torch.equal(torch.cat([part.dense() for part in parts]), whole.dense())
    apart = [FourBitWeight.quantize(one, double=double) for one in normal(sum(rows), width).split(list(rows))]
    assert torch.equal(torch.cat([part.codes for part in parts]), torch.cat([part.codes for part in apart]))
    # Magnitudes of magnitudes are of all together: packed one by one the parts would be others, where there are any.
    assert torch.equal(torch.cat([part.dense() for part in apart]), whole.dense()) == (not double)


def test_a_weight_that_cannot_be_split() -> None:
    weight = FourBitWeight.quantize(normal(10, 7))
    with pytest.raises(ModelError, match="q: is packed in one piece for several layers, and a block of 64 numbers is"):
        weight.split((4, 6), where="q")
    with pytest.raises(ModelError, match=r"has 10 rows, its parts 4 \+ 5"):
        weight.split((4, 5))
