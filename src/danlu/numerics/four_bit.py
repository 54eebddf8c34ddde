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
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.numerics.codebooks import STEPS, Kind, dynamic_codes, dynamic_map, midpoints, order, pairs

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
