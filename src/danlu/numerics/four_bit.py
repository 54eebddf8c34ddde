"""Packing to 4 bits and back in plain torch (QLoRA, arXiv:2305.14314): the definition of bitsandbytes' results.

A matrix is read row by row as one run of numbers and cut into blocks. A block keeps the largest magnitude in it, and
for each number the 4-bit code with the value nearest to number / magnitude; two codes share a byte, the first in the
high half. Double quantization packs the magnitudes in turn: less their mean, 256 to a block, into 8 bits.

All arithmetic is float32, whatever the type of the matrix, and gives bitsandbytes' bits. Work goes by tiles: on a CPU
small ones that its caches hold, elsewhere halves of a matrix, since each operation on a tile is a kernel to launch.

N numbers · B blocks, of which the last may be short
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.numerics.bitsandbytes_config import Kind

CPU = torch.device("cpu")

# Quantiles of the standard normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, arXiv:2305.14314,
# appendix E). The index is the code.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# One bit of sign, two of exponent, one of mantissa, over the largest value; code 8 is a second zero.
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
_FP4 = (*_FP4_MAGNITUDES, 0.0, *(-magnitude for magnitude in _FP4_MAGNITUDES[1:]))
# FP4's codes from the lowest value to the highest. Of its two zeros code 0 comes first, so what is just above zero gets
# code 8 and what is just below gets code 0: bitsandbytes' order on a CPU.
_FP4_ORDER = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)


@cache
def codebook(kind: Kind, device: torch.device = CPU) -> Tensor:
    """[16] float32: the value of each code, in [-1, 1]."""
    return torch.tensor(_NF4 if kind == "nf4" else _FP4, device=device)


@cache
def pairs(kind: Kind, device: torch.device = CPU) -> Tensor:
    """[256] int64: the two float32 values of a byte of codes, the high half's first, as they lie in memory.

    One number, because looking up 8 bytes costs no more than looking up 4.
    """
    byte = torch.arange(256, device=device)
    values = codebook(kind, device)
    return torch.stack((values[byte >> 4], values[byte & 15]), dim=1).view(torch.int64).view(-1)


@cache
def order(kind: Kind, device: torch.device = CPU) -> Tensor | None:
    """[16] uint8: the codes from the lowest value to the highest; None where that is their own order."""
    return None if kind == "nf4" else torch.tensor(_FP4_ORDER, dtype=torch.uint8, device=device)


@cache
def midpoints(kind: Kind, device: torch.device = CPU) -> Tensor:
    """[15] float32, ascending: halfway between neighbouring values. A value on one belongs to the lower neighbour."""
    rising = codebook(kind, device).sort().values
    return (rising[:-1] + rising[1:]) / 2


@cache
def dynamic_map(device: torch.device = CPU) -> Tensor:
    """[256] float32, ascending from -0.993 to 1: seven decades of both signs, the higher the finer, and zero.

    The signed dynamic data type (arXiv:1511.04561) in bitsandbytes' form.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        centres = (edges[:-1] + edges[1:]) / 2
        # A power of ten from Python, a product in float32: these bits are in every file that bitsandbytes writes.
        magnitudes = (10.0 ** (decade - 6) * centres).tolist()
        values += magnitudes + [-magnitude for magnitude in magnitudes]
    return torch.tensor(sorted(values), device=device)


STEPS = 65535


@cache
def dynamic_codes(device: torch.device = CPU) -> Tensor:
    """[65536] uint8: the entry of `dynamic_map` for each of 65536 even steps from -1 to 1.

    bitsandbytes' CPU kernel rounds a value to such a step before it looks for the nearest entry, so about one value in
    a thousand gets a neighbour of the entry that is nearest. We round as it does, to get its bits.
    """
    values = dynamic_map(device)
    steps = -1.0 + (2.0 * torch.arange(STEPS + 1, dtype=torch.float32, device=device)) / STEPS
    return torch.bucketize(steps, 0.5 * (values[:-1] + values[1:])).to(torch.uint8)


BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers in a block, as far as bitsandbytes knows them."""

NESTED_BLOCK = 256
"""Magnitudes in a block of double quantization."""

TILE = 7 * 4096
"""Numbers worked on at a time: a multiple of every block, small enough for a core's cache.

From 32768 numbers on torch splits each operation among threads. Here that gains nothing, and on a busy machine, where
every operation then waits for the slowest thread, packing takes ten times as long.
"""

_LARGEST_TILE = 1 << 27
"""The same on other devices, where it is the number of operations that takes time: at most 512 MiB of float32."""

# bitsandbytes divides by no less than this, so that a block of zeros gives zeros and not NaN.
_SMALLEST = 1e-38


class Nested(NamedTuple):
    """The absmax of blocks, quantized to 8 bits each (double quantization)."""

    codes: Tensor  # [B] uint8
    absmax: Tensor  # [ceil(B / 256)] float32
    offset: Tensor  # [] float32: the mean that was taken off
    values: Tensor  # [256] float32: what the codes stand for


class FourBitMatrix(NamedTuple):
    """A matrix quantized to 4 bits a number, with the values that dequantizing it needs."""

    kind: Kind
    block: int
    shape: tuple[int, int]  # (O, I)
    dtype: torch.dtype  # of the matrix that was packed
    codes: Tensor  # [ceil(N / 2), 1] uint8
    absmax: Tensor | Nested  # [B] float32


def quantize(matrix: Tensor, kind: Kind, block: int) -> tuple[Tensor, Tensor]:
    """matrix [O, I] of any strides -> (codes [ceil(N / 2), 1] uint8, absmax [B] float32).

    A block with NaN or infinity in it has such a magnitude; whoever calls looks at those.
    """
    count = matrix.numel()
    codes = torch.empty((count + 1) // 2, dtype=torch.uint8, device=matrix.device)
    absmax = torch.empty(_parts(count, block), device=matrix.device)
    start = 0
    for numbers in row_major(matrix.detach(), block):
        stop = start + numbers.numel()
        # Tiles begin with a block and at an even number, so a byte never holds codes of two tiles.
        scaled = _scaled(numbers, block, absmax[start // block : _parts(stop, block)])
        nearest = _nearest(scaled, kind)
        codes[start // 2 : (stop + 1) // 2] = (nearest[::2] << 4) | nearest[1::2]
        start = stop
    return codes.unsqueeze(1), absmax


def apart(codes: Tensor, count: int) -> Tensor:
    """codes [ceil(N / 2), 1] -> [N] uint8, one a byte."""
    bytes_ = codes.view(-1)
    return torch.stack((bytes_ >> 4, bytes_ & 15), dim=1).view(-1)[:count]


def join(codes: Tensor) -> Tensor:
    """Codes one a byte, of any shape and strides, row by row -> [ceil(N / 2), 1]."""
    flat = codes.reshape(-1)
    flat = F.pad(flat, (0, flat.numel() % 2))
    return ((flat[::2] << 4) | flat[1::2]).unsqueeze(1)


def dequantize_into(out: Tensor, codes: Tensor, absmax: Tensor, kind: Kind, block: int) -> None:
    """Writes the matrix into `out` (contiguous, N numbers, any float type): products in float32, rounded once."""
    flat, packed, values = out.view(-1), codes.view(-1), pairs(kind, out.device)
    size = tile_size(flat.numel(), out.device)
    for start in range(0, flat.numel(), size):
        tile = flat[start : start + size]
        # One look-up of a byte gives both of its numbers: 8 bytes read as two float32.
        of_tile = packed[start // 2 : _parts(start + tile.numel(), 2)].to(torch.int32)
        numbers = torch.index_select(values, 0, of_tile).view(torch.float32)[: tile.numel()]
        tile.copy_(_times(numbers, absmax[start // block : _parts(start + tile.numel(), block)], block))


def tile_size(count: int, device: torch.device) -> int:
    """How many of `count` numbers are worked on at a time: a multiple of every block size.

    On a CPU small tiles are faster, though there are 586 of them in a 4096 x 4096 matrix: 26 ms against 101 for all of
    it at once (bfloat16, two threads). Elsewhere it is halves, which take half the memory of the whole.
    """
    if device.type == "cpu":
        return TILE
    return min(_LARGEST_TILE, BLOCKS[-1] * _parts(count, 2 * BLOCKS[-1]))


def quantize_absmax(absmax: Tensor) -> Nested:
    """Quantizes absmax [B] float32 to 8 bits each.

    torch's mean over hundreds of thousands of numbers changes in its last bit with the number of threads, and with it
    `offset`: here as in bitsandbytes.
    """
    offset = absmax.mean()
    centred = F.pad(absmax - offset, (0, -absmax.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = centred.abs().amax(dim=1)
    scaled = centred * (1 / largest.where(largest > 0, 1)).unsqueeze(1)
    # The nearest of 255 uneven values, by a table over even steps: the same entries as bitsandbytes finds.
    steps = ((scaled.clamp_(-1, 1) + 1) * 0.5 * STEPS + 0.5).to(torch.int32)
    codes = torch.index_select(dynamic_codes(absmax.device), 0, steps.view(-1)).view(-1, NESTED_BLOCK)
    codes[largest == 0] = 0
    return Nested(codes.view(-1)[: absmax.numel()].clone(), largest, offset, dynamic_map(absmax.device))


def dequantize_absmax(nested: Nested) -> Tensor:
    """The absmax of blocks, [B] float32, out of 8 bits each."""
    values = torch.index_select(nested.values, 0, nested.codes.to(torch.int32))
    return _times(values, nested.absmax, NESTED_BLOCK).add_(nested.offset)


def row_major(matrix: Tensor, block: int) -> Iterator[Tensor]:
    """`matrix` row by row as flat tiles of whole blocks, but for the last; copied, a tile at a time, if strides ask."""
    size = tile_size(matrix.numel(), matrix.device)
    if matrix.is_contiguous():
        yield from matrix.view(-1).split(size)
        return
    width = matrix.shape[1]
    together = block // gcd(block, width)  # rows after which a block ends where a row ends
    for rows in matrix.split(together * max(1, size // (together * width))):
        yield rows.reshape(-1)


def _scaled(numbers: Tensor, block: int, absmax: Tensor) -> Tensor:
    """numbers [n] -> [n, made even] float32 over their blocks' largest magnitudes, which go into `absmax`."""
    numbers = numbers.to(torch.float32)
    whole = numbers.numel() // block
    blocks = numbers[: whole * block].view(-1, block)
    absmax[:whole] = blocks.abs().amax(dim=1)
    scaled = (blocks * (1 / absmax[:whole].clamp(min=_SMALLEST)).unsqueeze(1)).view(-1)
    if whole == absmax.numel():
        return scaled
    # A short last block is divided, not multiplied by the reciprocal, and its stored magnitude is never 0.
    tail = numbers[whole * block :]
    absmax[whole] = tail.abs().amax().clamp(min=_SMALLEST)
    return torch.cat((scaled, F.pad(tail / absmax[whole], (0, tail.numel() % 2))))


def _nearest(scaled: Tensor, kind: Kind) -> Tensor:
    """[n] float32 in [-1, 1] -> [n] uint8, the codes."""
    between, codes_by_value = midpoints(kind, scaled.device), order(kind, scaled.device)
    if scaled.device.type == "cpu":
        # How many midpoints lie below. 15 comparisons by numpy take a tenth of torch.bucketize's time (1.2 ns a number
        # against 12.7), and torch's own comparisons twelve times as long as numpy's.
        numbers, above = scaled.numpy(), np.empty(scaled.numel(), dtype=np.bool_)
        counts, of_above = np.zeros(scaled.numel(), dtype=np.uint8), above.view(np.uint8)
        for midpoint in between.numpy():
            np.greater(numbers, midpoint, out=above)
            np.add(counts, of_above, out=counts)
        places = torch.from_numpy(counts)
    else:
        places = torch.bucketize(scaled, between, out_int32=True).to(torch.uint8)
    return places if codes_by_value is None else torch.index_select(codes_by_value, 0, places.to(torch.int32))


def _times(numbers: Tensor, absmax: Tensor, block: int) -> Tensor:
    """Multiplies each block of numbers [n] float32, in place, by its absmax."""
    whole = numbers.numel() // block
    numbers[: whole * block].view(-1, block).mul_(absmax[:whole].unsqueeze(1))
    if whole * block < numbers.numel():
        numbers[whole * block :].mul_(absmax[whole])
    return numbers


def _parts(count: int, size: int) -> int:
    """(start, stop) of stretches of `size` out of `count`."""
    return -(-count // size)
