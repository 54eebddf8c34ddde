"""Weights as integers of 8 or 4 bits, rounded to the nearest: the plain method that others are compared with.

Inputs are cut into groups. A group of an output's weights shares a scale, its largest magnitude over 127 (or 7), and a
weight is the nearest multiple of it. Symmetric, so zero stays zero; no data is looked at.

O, I outputs and inputs · G groups of inputs, of which the last may be short
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.four_bit import tile_size
from danlu.numerics.four_bit_weight import check_quantizable
from danlu.numerics.quantized_weight import QuantizedWeightModule

Bits = Literal[4, 8]
_LARGEST = {8: 127, 4: 7}

# A float32 sum with this keeps no digit after the point: added and taken off again it rounds to the nearest, halves to
# even, as torch.round does, which splits even small tiles among threads (see four_bit.TILE).
_ROUNDING = 1.5 * 2**23


class IntegerWeight(QuantizedWeightModule):
    """A frozen matrix [O, I] as integers and a float32 scale for each group of inputs."""

    codes: Tensor  # [O, I] int8; with 4 bits [O, ceil(I / 2)] uint8, code + 8, the first of two in the high half
    scales: Tensor  # [O, G] float32

    def __init__(
        self, codes: Tensor, scales: Tensor, *, bits: Bits, group: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.bits: Bits = bits
        self.group = group
        self.shape = shape
        self.dtype = dtype
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @classmethod
    def quantize(cls, weight: Tensor, bits: Bits, *, group: int = 128, where: str = "a matrix") -> Self:
        """Quantizes weight [O, I], of any strides.

        Raises:
            ModelError: `where` is no matrix of float32, bfloat16 or float16, or not all of it is finite.
        """
        assert bits in _LARGEST and group > 0, f"{bits} bits in groups of {group}"
        check_quantizable(weight, where)
        outputs, inputs = weight.shape
        scales = torch.empty(outputs, -(-inputs // group), device=weight.device)
        codes = torch.empty(
            (outputs, inputs if bits == 8 else (inputs + 1) // 2),
            dtype=torch.int8 if bits == 8 else torch.uint8,
            device=weight.device,
        )
        for rows in _tiles(outputs, inputs, weight.device):
            grouped = _grouped(weight.detach()[rows].to(torch.float32), group)  # [rows, G, group]
            largest = grouped.abs().amax(dim=2)
            scales[rows] = largest / _LARGEST[bits]
            # A group of zeros, or one so small that its scale is 0, has codes 0.
            unit = scales[rows].where(scales[rows] > 0, 1).unsqueeze(2)
            rounded = (grouped / unit).add_(_ROUNDING).sub_(_ROUNDING).clamp_(-_LARGEST[bits], _LARGEST[bits])
            numbers = rounded.flatten(1)[:, :inputs]
            codes[rows] = numbers.to(torch.int8) if bits == 8 else _two_a_byte(numbers)
        if not bool(torch.isfinite(scales).all()):
            raise ModelError(f"{where} cannot be quantized: it holds NaN or infinite values. Use a sound model.")
        return cls(codes, scales, bits=bits, group=group, shape=(outputs, inputs), dtype=weight.dtype)

    def shard(self, rows: slice, columns: slice) -> IntegerWeight:
        """Some rows and columns, by the same codes; groups get smaller where the columns split one."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        group = gcd(self.group, columns.start)
        firsts = torch.arange(columns.start, columns.stop, group, device=self.device)
        scales = self.scales[rows][:, firsts // self.group].clone()
        if self.bits == 8:
            codes = self.codes[rows, columns].clone()
        else:
            bytes_ = self.codes[rows]
            codes = torch.stack((bytes_ >> 4, bytes_ & 15), dim=2).flatten(1)[:, columns]
            codes = F.pad(codes, (0, shape[1] % 2), value=8)
            codes = (codes[:, ::2] << 4) | codes[:, 1::2]
        return IntegerWeight(codes, scales, bits=self.bits, group=group, shape=shape, dtype=self.dtype)

    def write(self, out: Tensor) -> None:
        outputs, inputs = self.shape
        for rows in _tiles(outputs, inputs, out.device):
            if self.bits == 8:
                numbers = self.codes[rows].to(torch.float32)
            else:
                bytes_ = self.codes[rows].to(torch.int32).view(-1)
                numbers = torch.index_select(_pairs(out.device), 0, bytes_).view(torch.float32)
                numbers = numbers.view(-1, 2 * self.codes.shape[1])[:, :inputs]
            grouped = _grouped(numbers, self.group) * self.scales[rows].unsqueeze(2)
            out[rows] = grouped.flatten(1)[:, :inputs]

    def write_stacked(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """See `QuantizedWeightModule`: as one matrix, since no two rows share a scale."""
        codes, scales = (tensors[name].flatten(0, 1) for name in ("codes", "scales"))
        shape = (len(codes), self.shape[1])
        rows = IntegerWeight(codes, scales, bits=self.bits, group=self.group, shape=shape, dtype=self.dtype)
        rows.write(out.flatten(0, 1))

    def extra_repr(self) -> str:
        return f"int{self.bits}, {super().extra_repr()}"


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256] int64: the two float32 values of a byte, as they lie in memory."""
    byte = torch.arange(256, device=device)
    return torch.stack(((byte >> 4) - 8, (byte & 15) - 8), dim=1).to(torch.float32).view(torch.int64).view(-1)


def _tiles(outputs: int, inputs: int, device: torch.device) -> list[slice]:
    size = tile_size(outputs * inputs, device)
    step = max(1, size // inputs if device.type == "cpu" else -(-size // inputs))
    return [slice(start, start + step) for start in range(0, outputs, step)]


def _grouped(numbers: Tensor, group: int) -> Tensor:
    """[rows, I] -> [rows, G, group], with zeros where the last group is short."""
    missing = -numbers.shape[1] % group
    padded = F.pad(numbers, (0, missing)) if missing else numbers
    return padded.unflatten(1, (-1, group))


def _two_a_byte(numbers: Tensor) -> Tensor:
    """[rows, I] float32, whole numbers from -7 to 7 -> [rows, ceil(I / 2)] uint8."""
    shifted = F.pad(numbers, (0, numbers.shape[1] % 2)).add_(8).to(torch.uint8)
    return (shifted[:, ::2] << 4) | shifted[:, 1::2]
