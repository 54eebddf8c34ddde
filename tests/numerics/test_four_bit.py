"""Codes and constants against bitsandbytes, bit for bit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from builders.kernel_count import Kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.numerics import four_bit
from danlu.numerics.bitsandbytes_config import KINDS, Kind
from danlu.numerics.four_bit import BLOCKS, TILE, codebook, dynamic_map, midpoints

# Whole blocks, a short last block, odd counts, single rows and columns, less than a block, blocks across rows.
SHAPES = [
    *((4, 64), (64, 20), (17, 192), (300, 700)),
    *((5, 80), (10, 72), (3, 96), (33, 160), (3, 48), (8, 24), (2, 62)),
    *((1, 63), (3, 33), (1001, 257), (63, 1), (1, 2), (1, 1)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def functional() -> ModuleType:
    import bitsandbytes.functional  # seconds: not when tests are collected

    return bitsandbytes.functional


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def unpacked(codes: Tensor, absmax: Tensor, shape: tuple[int, ...], kind: Kind, block: int) -> Tensor:
    out = torch.full(shape, torch.nan)
    four_bit.dequantize_into(out, codes, absmax, kind, block)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 14336), (5120, 1000), (3, 33)])
def test_a_gpu_unpacks_a_matrix_in_ten_kernels(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Without bitsandbytes: on the meta device, which has the operations of a GPU and no numbers."""
    count = shape[0] * shape[1]
    out, codes, absmax = (
        torch.empty(size, dtype=one, device="meta")
        for size, one in ((shape, dtype), ((-(-count // 2), 1), torch.uint8), (-(-count // 64), torch.float32))
    )
    with Kernels(min_numel=min(1000, count)) as kernels:
        four_bit.dequantize_into(out, codes, absmax, "nf4", 64)
    assert 0 < len(kernels.names) <= 10, kernels.names
    if count > TILE:
        with Kernels(min_numel=1000) as tiled:  # the negative control: as a CPU does it
            four_bit.dequantize_into(torch.empty(300, 700), *four_bit.quantize(normal(300, 700), "nf4", 64), "nf4", 64)
        assert len(tiled.names) > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(300, 700), (1001, 257), (5, 80), (1, 1)])
def test_halves_give_the_bits_of_small_tiles(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], kind: Kind
) -> None:
    matrix = normal(*shape)
    codes, absmax = four_bit.quantize(matrix, kind, 64)
    expected = unpacked(codes, absmax, shape, kind, 64)
    asked = []

    def as_on_a_gpu(count: int, device: torch.device) -> int:
        asked.append(count)
        return tile_size(count, torch.device("meta"))

    tile_size = four_bit.tile_size
    monkeypatch.setattr(four_bit, "tile_size", as_on_a_gpu)
    again = four_bit.quantize(matrix, kind, 64)
    transposed = four_bit.quantize(matrix.t().contiguous().t(), kind, 64)
    for codes_, absmax_ in (again, transposed):
        assert torch.equal(codes_, codes) and torch.equal(absmax_, absmax)
    assert torch.equal(unpacked(codes, absmax, shape, kind, 64), expected) and len(asked) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_magnitudes(functional: ModuleType, shape: tuple[int, int], dtype: torch.dtype, kind: Kind) -> None:
    matrix = normal(*shape, dtype=dtype)
    expected, state = functional.quantize_4bit(matrix, quant_type=kind)
    codes, absmax = four_bit.quantize(matrix, kind, 64)
    assert torch.equal(codes, expected) and codes.shape == expected.shape
    assert torch.equal(absmax, state.absmax)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_size_of_block(functional: ModuleType, block: int) -> None:
    matrix = normal(67, 193)
    expected, state = functional.quantize_4bit(matrix, quant_type="nf4", blocksize=block)
    codes, absmax = four_bit.quantize(matrix, "nf4", block)
    assert torch.equal(codes, expected) and torch.equal(absmax, state.absmax)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
def test_scales_of_weights(functional: ModuleType, scale: float) -> None:
    matrix = normal(40, 96, scale=scale)
    expected, state = functional.quantize_4bit(matrix, quant_type="nf4")
    codes, absmax = four_bit.quantize(matrix, "nf4", 64)
    assert torch.equal(codes, expected) and torch.equal(absmax, state.absmax)


@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind: Kind) -> None:
    for shape in ((300, 700), (257, 1001), (1, 70001), (70001, 1), (129, 64)):
        matrix = normal(*shape)
        expected = four_bit.quantize(matrix, kind, 64)
        for strided in (matrix.t().contiguous().t(), torch.stack((matrix, -matrix), dim=2)[:, :, 0]):
            assert all(map(torch.equal, four_bit.quantize(strided, kind, 64), expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_halfway_goes_to_the_lower_neighbour(functional: ModuleType, kind: Kind) -> None:
    halfway = midpoints(kind)
    matrix = torch.cat((torch.ones(1), halfway, torch.zeros(48))).unsqueeze(0)  # the block's magnitude is 1
    expected, _ = functional.quantize_4bit(matrix, quant_type=kind)
    codes, absmax = four_bit.quantize(matrix, kind, 64)
    assert torch.equal(codes, expected)
    rising = codebook(kind).sort().values
    values = unpacked(codes, absmax, (64,), kind, 64)[1:16]
    assert torch.equal(values, rising[:-1]) and not torch.equal(values, rising[1:])
    # A hair above, it goes to the upper one.
    matrix[0, 1:16] = torch.nextafter(halfway, torch.tensor(2.0))
    assert torch.equal(unpacked(four_bit.quantize(matrix, kind, 64)[0], absmax, (64,), kind, 64)[1:16], rising[1:])


def test_the_first_of_two_numbers_is_in_the_high_half(functional: ModuleType) -> None:
    matrix = normal(6, 64)
    codes, absmax = four_bit.quantize(matrix, "nf4", 64)
    expected, _ = functional.quantize_4bit(matrix, quant_type="nf4")
    swapped = (codes << 4) | (codes >> 4)
    assert torch.equal(codes, expected) and not torch.equal(swapped, expected)
    right, wrong = (unpacked(packed, absmax, (6, 64), "nf4", 64) for packed in (codes, swapped))
    assert (right - matrix).abs().mean() < 0.1 < 1 < (wrong - matrix).abs().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(functional: ModuleType, kind: Kind) -> None:
    whole, short = torch.zeros(3, 64), torch.cat((torch.ones(64), torch.zeros(9))).unsqueeze(0)
    for matrix in (whole, short):
        expected, state = functional.quantize_4bit(matrix, quant_type=kind)
        codes, absmax = four_bit.quantize(matrix, kind, 64)
        assert torch.equal(codes, expected) and torch.equal(absmax, state.absmax)
        assert torch.equal(unpacked(codes, absmax, matrix.shape, kind, 64), matrix)
        nested = four_bit.quantize_absmax(absmax)
        restored = unpacked(codes, four_bit.dequantize_absmax(nested), matrix.shape, kind, 64)
        assert torch.equal(restored == 0, matrix == 0)


@pytest.mark.parametrize("blocks", [1, 2, 7, 255, 256, 257, 300, 1000, 12288])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_double_quantization(functional: ModuleType, blocks: int, scale: float) -> None:
    absmax = normal(1, blocks, scale=scale)[0].abs()
    offset = absmax.mean()
    expected, state = functional.quantize_blockwise(absmax - offset, blocksize=256)
    nested = four_bit.quantize_absmax(absmax)
    assert torch.equal(nested.codes, expected)
    assert torch.equal(nested.absmax, state.absmax) and torch.equal(nested.offset, offset)
    restored = functional.dequantize_blockwise(expected, state) + offset
    assert torch.equal(four_bit.dequantize_absmax(nested), restored)


def test_double_quantization_of_every_step(functional: ModuleType) -> None:
    """The whole table by which bitsandbytes' kernel finds 8-bit codes, not only its usual entries."""
    centred = torch.linspace(-1, 1, 256 * 2048)
    centred[::256] = 1.0  # the magnitude of every block
    centred -= centred.mean()
    absmax = centred + 1.5
    expected, _ = functional.quantize_blockwise(absmax - absmax.mean(), blocksize=256)
    nested = four_bit.quantize_absmax(absmax)
    assert torch.equal(nested.codes, expected)
    # The entries that are truly nearest are not it: about one in a thousand differs.
    values = dynamic_map()
    scaled = (absmax - absmax.mean()).view(-1, 256) / nested.absmax[:, None]
    nearest = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2).view(-1)
    share = (nearest != expected.int()).float().mean().item()
    assert 1e-4 < share < 1e-2


def test_double_quantization_of_equal_magnitudes() -> None:
    nested = four_bit.quantize_absmax(torch.full((300,), 0.25))
    assert torch.equal(four_bit.dequantize_absmax(nested), torch.full((300,), 0.25))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking(functional: ModuleType, shape: tuple[int, int], dtype: torch.dtype, kind: Kind) -> None:
    matrix = normal(*shape, dtype=dtype)
    codes, absmax = four_bit.quantize(matrix, kind, 64)
    out = torch.full(shape, torch.nan, dtype=dtype)
    four_bit.dequantize_into(out, codes, absmax, kind, 64)
    assert torch.equal(out, by_bitsandbytes(functional, codes, absmax, shape, dtype, kind))


def by_bitsandbytes(
    functional: ModuleType, codes: Tensor, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype, kind: Kind
) -> Tensor:
    """As rows of one block each: with other rows its CPU kernel takes scales of the wrong blocks."""
    padded = torch.zeros(len(absmax) * 32, 1, dtype=torch.uint8)
    padded[: len(codes)] = codes
    state = functional.QuantState(
        absmax, shape=(len(absmax), 64), code=codebook(kind), blocksize=64, quant_type=kind, dtype=dtype
    )
    # One block alone would be taken for a transposed matrix.
    return functional.dequantize_4bit(padded, state).reshape(-1)[: shape[0] * shape[1]].view(shape)


def test_the_error_of_normal_weights_is_as_published() -> None:
    matrix = normal(512, 512)
    errors = {}
    for kind in KINDS:
        codes, absmax = four_bit.quantize(matrix, kind, 64)
        restored = unpacked(codes, absmax, matrix.shape, kind, 64)
        errors[kind] = ((restored - matrix).abs().mean() / matrix.abs().mean()).item()
    assert errors["nf4"] == pytest.approx(0.091, abs=0.001)
    assert errors["nf4"] < errors["fp4"]


class Made(TorchDispatchMode):
    """The bytes of every tensor that an operation makes; views of `given` are none."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given.untyped_storage().data_ptr()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != self.given:
            self.bytes.append(result.untyped_storage().nbytes())
        return result


def test_temporaries_are_of_a_tile() -> None:
    contiguous = normal(512, 2048, dtype=torch.bfloat16)
    for matrix in (contiguous, contiguous.t().contiguous().t()):
        with Made(matrix) as made:
            four_bit.quantize(matrix, "nf4", 64)
        codes_bytes = matrix.numel() // 2
        assert codes_bytes in made.bytes and max(made.bytes) == max(codes_bytes, 4 * TILE)
