"""Numbers in few bits: the type of an element, the blocks that share a scale, and how scales and zeros are kept.

A number is `(code - zero) * scale`, in float32. Elements are floating-point (E4M3 and E5M2 of arXiv:2209.05433, E2M1 of
the OCP Microscaling formats 1.0, E5M6 of DeepSeek-V3, arXiv:2412.19437, section 3.3) or integers of 8 to 2 bits. Casts
to E4M3 differ between releases of torch (2.13 makes 448 of infinity, older ones NaN), so numbers are clamped before.

R, C rows and columns · Rb, Cb blocks of rows and of columns, of which the last ones may be short
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Element = Literal["e4m3", "e5m2", "e5m6", "e2m1", "int8", "int7", "int6", "int5", "int4", "int3", "int2"]
ScaleKind = Literal["float32", "float16", "bfloat16", "power-of-two", "e8m0", "e4m3"]
ZeroKind = Literal["none", "integer", "float", "offset"]
Rounding = Literal["up", "floor"]

WHOLE = 0
"""The size of a block that has all rows, or all columns."""
_E4M3_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: a quotient by less may be infinite."""
_MOST_STEPS = 32000.0
"""The most steps from 0 to a block that is encoded with an offset: fewer than 2^15 by a scale in bfloat16 too."""
_NAN_BITS, _SMALLEST_E8M0_BITS = 0x7FC00000, 1 << 22
"""The bits of float32's NaN, and of 2^-127, of which the 8 bits behind the sign are the bytes of E8M0."""


class ElementType(NamedTuple):
    """An element's properties."""

    bits: int
    largest: float
    """The largest magnitude; of integers half the number of steps, as compressed-tensors and GPTQ scale them."""
    dtype: torch.dtype
    """The dtype of codes in memory, one element each."""
    exponent: int = 0
    """floor(log2(largest)) of a floating-point element."""

    @property
    def is_float(self) -> bool:
        return self.exponent > 0


ELEMENTS: dict[str, ElementType] = {
    "e4m3": ElementType(8, _E4M3_LARGEST, torch.float8_e4m3fn, 8),
    "e5m2": ElementType(8, 57344.0, torch.float8_e5m2, 15),
    "e5m6": ElementType(12, 65024.0, torch.bfloat16, 15),
    "e2m1": ElementType(4, 6.0, torch.uint8, 2),
    **{f"int{bits}": ElementType(bits, (2**bits - 1) / 2, torch.int8) for bits in range(2, 9)},
}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 by code; the fourth bit is the sign."""


@dataclass(frozen=True)
class Format:
    """How a matrix is stored.

    Raises ValueError for what does not go together.
    """

    element: Element
    block: tuple[int, int]
    """(rows, columns) that share a scale; `WHOLE`: all of them."""
    scale: ScaleKind = "float32"
    """power-of-two is one in float32; e8m0 one in a byte; e4m3 has a float32 scale of the whole tensor above it, as
    NVFP4."""
    zero: ZeroKind = "none"
    """integer: codes are unsigned and zero is one of them, so that 0 is exact. float: any number of steps. offset: a
    whole number of steps in 16 bits, between the least and the greatest number of a block that may lie on one side of
    0."""
    rounding: Rounding = "up"
    """The direction of a power of two. up: no number saturates (DeepSeek-V3). floor: as OCP, where the largest may."""
    narrow_range: bool = False
    """Integers without the lowest code, as many of both signs: -127 to 127, and scales of the largest over 127."""

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS or self.scale not in get_args(ScaleKind) or min(self.block) < 0:
            raise ValueError(f"no such format: {self}")
        if self.zero != "none" and self.of_element.is_float:
            raise ValueError(f"{self.element} is symmetric: it has no zero")
        if self.scale in ("power-of-two", "e8m0") and self.zero != "none":
            raise ValueError("a format with a zero has no power of two as its scale")
        if self.narrow_range and (self.zero != "none" or self.of_element.is_float):
            raise ValueError("a narrow range is one of integers without a zero")

    @property
    def of_element(self) -> ElementType:
        return ELEMENTS[self.element]

    @property
    def bits(self) -> int:
        """Bits of an element, without scales."""
        return self.of_element.bits

    @property
    def largest(self) -> float:
        """The largest magnitude of a block in steps of its scale."""
        return math.floor(self.of_element.largest) if self.narrow_range else self.of_element.largest

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of blocks of rows and of columns of a matrix."""
        high, wide = self.block_of(rows, columns)
        return -(-rows // high), -(-columns // wide)

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns of a block of a matrix of that size, at least one of each."""
        return max(1, self.block[0] or rows), max(1, self.block[1] or columns)


FP8_BLOCKS = Format("e4m3", (128, 128))
"""The format of FP8 folders (DeepSeek-V3)."""
MXFP8 = Format("e4m3", (1, 32), "e8m0")
MXFP4 = Format("e2m1", (1, 32), "e8m0", rounding="floor")
NVFP4 = Format("e2m1", (1, 16), "e4m3")


@dataclass(frozen=True)
class Scaled:
    """Matrices [.., R, C] in a format."""

    codes: Tensor
    """[.., R, C] in `ElementType.dtype`; of integers with a zero uint8, from 0 on."""
    scales: Tensor
    """[.., Rb, Cb]: float32, or what the format says (e8m0: uint8, the exponent + 127)."""
    format: Format
    zeros: Tensor | None = None
    """[.., Rb, Cb]: uint8 codes, float32 steps, or int16 steps (`offset`)."""
    tensor_scale: Tensor | None = None
    """[.., 1, 1] float32, above scales of E4M3."""
    groups: Tensor | None = None
    """[C] int32, of blocks that are not of neighbouring columns: the block of each column (GPTQ's act_order)."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def wide_scales(self) -> Tensor:
        """Returns the scales [.., Rb, Cb] in float32, with that of the tensor."""
        if self.format.scale == "e8m0":
            return exponents_to_scales(self.scales)
        scales = self.scales.float()
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the numbers [.., R, C]: made in float32, and rounded to `dtype` once."""
        block = self.format.block_of(*self.shape[-2:])
        numbers = _numbers(self.codes, self.format)

        def of_blocks(values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            if self.groups is None:
                return _by_blocks(numbers, values, block)
            return _by_blocks(numbers, values.index_select(-1, self.groups), (block[0], 1))

        if self.zeros is not None:
            for part, zeros in of_blocks(self.zeros.float()):
                part.sub_(zeros)
        for part, scales in of_blocks(self.wide_scales()):
            part.mul_(scales)
        return numbers.to(dtype)

    def transposed(self) -> Scaled:
        """The transposed matrices [.., C, R], as views."""
        form = replace(self.format, block=(self.format.block[1], self.format.block[0]))
        zeros = None if self.zeros is None else self.zeros.transpose(-1, -2)
        return Scaled(self.codes.transpose(-1, -2), self.scales.transpose(-1, -2), form, zeros, self.tensor_scale)

    def box(self, rows: slice, columns: slice) -> Scaled:
        """Some rows and columns by the same codes: nothing is encoded again. A block that they cut gets smaller.

        Slices have a start and a stop.
        """
        height, width = self.shape[-2:]
        high, wide = self.format.block_of(height, width)
        codes = self.codes[..., rows, columns].contiguous()
        if self.groups is not None:
            own = math.gcd(high, rows.start)
            of_rows = torch.arange(rows.start, rows.stop, own, device=self.codes.device) // high
            scales, zeros = (None if each is None else each[..., of_rows, :] for each in (self.scales, self.zeros))
            assert scales is not None
            form = replace(self.format, block=(own, wide))
            return Scaled(codes, scales, form, zeros, self.tensor_scale, self.groups[columns])
        # Blocks of the box begin at its first row and column, so one that is cut at the front is several smaller ones.
        block = math.gcd(high, rows.start), math.gcd(wide, columns.start)
        of_rows = torch.arange(rows.start, rows.stop, block[0], device=self.codes.device) // high
        of_columns = torch.arange(columns.start, columns.stop, block[1], device=self.codes.device) // wide

        def of_blocks(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[..., of_rows, :][..., of_columns]

        scales = of_blocks(self.scales)
        assert scales is not None
        form = replace(self.format, block=block)
        return Scaled(codes, scales, form, of_blocks(self.zeros), self.tensor_scale)


def encode(x: Tensor, form: Format, largest: Tensor | None = None) -> Scaled:
    """Rounds matrices x [.., R, C], of any float dtype, to the nearest numbers of a format, ties to even.

    largest: the magnitudes [.., Rb, Cb] that scales are made of; by default `largest_of_blocks`. Formats with a zero
    have none.
    Blocks with NaN or infinity have a scale that is not finite; `Scaled.wide_scales` shows them, and nothing waits for
    a device here. Of x without elements there are no scales.
    """
    if form.zero != "none":
        return _encode_with_zero(x, form)
    scales, tensor_scale = scales_of(largest_of_blocks(x, form) if largest is None else largest, form)
    return encode_as(x, Scaled(x, scales, form, tensor_scale=tensor_scale))


def encode_as(x: Tensor, grid: Scaled) -> Scaled:
    """Rounds x [.., R, C] to the nearest numbers that have the scales and zeros of `grid`, a matrix of that size."""
    block = grid.format.block_of(*x.shape[-2:])
    steps = x.to(torch.float32, copy=True)
    for part, scales in _by_blocks(steps, grid.wide_scales(), block):
        part.div_(scales)
    if grid.zeros is None:
        return replace(grid, codes=codes_of(steps, grid.format))
    for part, zeros in _by_blocks(steps, grid.zeros.float(), block):
        part.add_(zeros)
    return replace(grid, codes=steps.round_().clamp_(0, 2**grid.format.bits - 1).to(torch.uint8))


def largest_of_blocks(x: Tensor, form: Format) -> Tensor:
    """Returns the largest magnitudes [.., Rb, Cb] in float32 of the blocks of x [.., R, C]."""
    least, greatest = _extremes(x, form)  # of magnitudes, there would be another tensor of that size
    return torch.maximum(greatest, least.neg_()).abs_()


def scales_of(largest: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """Returns the scales of blocks [.., Rb, Cb] with these largest magnitudes, as stored, and the tensor's own one."""
    of_tensor = largest.amax(dim=(-2, -1), keepdim=True) if largest.numel() else largest
    largest = largest.where(largest != 0, form.largest)  # all codes are zero at any scale
    if form.scale == "e4m3":
        tensor_scale = of_tensor.where(of_tensor != 0, form.largest) / (_E4M3_LARGEST * form.largest)
        tensor_scale = tensor_scale.clamp_min(_SMALLEST_SCALE)
        own = largest / (form.largest * tensor_scale)
        # Never zero: a small block's numbers are then zero by their codes, and not by a quotient of zeros.
        return own.clamp(2.0**-9, _E4M3_LARGEST).to(torch.float8_e4m3fn), tensor_scale
    if form.scale in ("power-of-two", "e8m0"):
        bits = _power_of_two_bits(largest, form)
        bits = bits.where(largest.isfinite(), _NAN_BITS)
        return ((bits >> 23).to(torch.uint8) if form.scale == "e8m0" else bits.view(torch.float32)), None
    scales = (largest / form.largest).clamp_min(_SMALLEST_SCALE)
    return _stored_scales(scales, form.scale), None


def exponents_to_scales(exponents: Tensor) -> Tensor:
    """Returns the float32 powers of two of E8M0 bytes; NaN for 255."""
    bits = exponents.to(torch.int32) << 23
    bits = bits.where(exponents != 0, _SMALLEST_E8M0_BITS).where(exponents != 255, _NAN_BITS)
    return bits.view(torch.float32)


def codes_of(scaled: Tensor, form: Format) -> Tensor:
    """Returns the codes of numbers in steps of their scale, float32 [..]; those beyond the largest one saturate.

    The numbers may be overwritten.
    """
    of_element = form.of_element
    match form.element:
        case "e2m1":
            magnitude = scaled.abs()
            # Between powers of two, codes are even steps: 1/2 below 2, 1 below 4, 2 from there on.
            above_two = torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round() + 4)
            rounded = torch.where(magnitude < 2, (magnitude * 2).round(), above_two).clamp_max(7)
            return (rounded + 8 * scaled.signbit()).to(torch.uint8)
        case "e5m6":
            bits = scaled.view(torch.int32)
            half = (bits >> 17).bitwise_and_(1).add_(0xFFFF)  # to the even one of two neighbours
            normal = half.add_(bits).bitwise_and_(-0x20000).view(torch.float32)  # 6 of 23 digits
            # Below 2^-14 steps are 2^-20, those of float32 between 8 and 16.
            rounded = normal.where(scaled.abs() >= 2**-14, scaled.add(12).sub_(12))
            return rounded.clamp_(-of_element.largest, of_element.largest).to(torch.bfloat16)
        case "e4m3" | "e5m2":
            return scaled.clamp_(-of_element.largest, of_element.largest).to(of_element.dtype)
    half = 2 ** (of_element.bits - 1)
    return scaled.round().clamp(int(form.narrow_range) - half, half - 1).to(torch.int8)


def _encode_with_zero(x: Tensor, form: Format) -> Scaled:
    """Encodes between the least and the greatest number of each block, 0 among them but for an offset."""
    least, greatest = _extremes(x, form)
    last = 2**form.bits - 1
    if form.zero == "offset":
        scales = torch.maximum((greatest - least) / last, torch.maximum(greatest, -least) / _MOST_STEPS)
    else:
        least, greatest = least.clamp_max_(0), greatest.clamp_min_(0)
        scales = ((greatest - least) / last).where(greatest != least, 1)
    stored = _stored_scales(scales.clamp_min(_SMALLEST_SCALE), form.scale)
    zeros = -least / stored.float()
    match form.zero:
        case "integer":
            zeros = zeros.round().clamp(0, last).to(torch.uint8)
        case "offset":
            zeros = zeros.round().clamp(-(2**15), 2**15 - 1).to(torch.int16)
    return encode_as(x, Scaled(x, stored, form, zeros))


def _stored_scales(scales: Tensor, kind: ScaleKind) -> Tensor:
    match kind:
        case "float16":
            # No scale becomes zero or infinite; one that is not finite stays so.
            return scales.clamp_min(2.0**-24).where(~scales.isfinite(), scales.clamp(2.0**-24, 65504.0)).half()
        case "bfloat16":
            return scales.bfloat16()
    return scales


def _power_of_two_bits(largest: Tensor, form: Format) -> Tensor:
    """Returns power-of-two scales of floating-point or integer elements as the bits of a float32, int32."""
    if form.rounding == "floor":
        exponent = form.of_element.exponent or math.floor(math.log2(form.largest))
        bits = (largest.view(torch.int32) >> 23).sub_(exponent).clamp_(0, 254) << 23
        return bits.where(bits != 0, _SMALLEST_E8M0_BITS)
    bits = (largest / form.largest).view(torch.int32) + 0x7FFFFF  # to the next power of two, where there are digits
    return bits.bitwise_and_(0xFF << 23).clamp_(1 << 23, 254 << 23)


def _numbers(codes: Tensor, form: Format) -> Tensor:
    """Returns the float32 numbers of codes, in steps of their scale: a new tensor."""
    if form.element == "e4m3" and codes.device.type == "cpu":
        return _numbers_of_e4m3(codes)
    if form.element != "e2m1":
        return codes.float()
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes.device)
    return values[codes.to(torch.int64)]


def _numbers_of_e4m3(codes: Tensor) -> Tensor:
    """`codes.float()` by operations on vectors, which torch's cast is not on a CPU: six times as fast.

    Exponent and digits are the first of a float16's, with a bias that differs by 8; NaN would be 480.
    """
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)  # which fills up with the sign
    numbers = halves.bitwise_and_(-0x4001).view(torch.float16).float().mul_(256)
    if codes.numel() and int((codes.view(torch.uint8) & 0x7F).amax()) == 0x7F:
        numbers.masked_fill_(numbers.abs() == 480, torch.nan)
    return numbers


def _extremes(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Returns the least and the greatest number of each block of x [.., R, C], [.., Rb, Cb] float32 each."""
    shape = *x.shape[:-2], *form.blocks(*x.shape[-2:])
    least, greatest = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    block = form.block_of(*x.shape[-2:])
    for values, reduce in ((least, Tensor.amin), (greatest, Tensor.amax)):
        for part, of_blocks in _by_blocks(x, values, block):
            of_blocks.copy_(reduce(part, dim=(-3, -1), keepdim=True))
    return least, greatest


def _by_blocks(x: Tensor, values: Tensor, block: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields parts of x [.., R, C] as views [.., Rb, rows, Cb, columns] of whole blocks, or of short ones at an end,
    each with the values of its blocks, [.., Rb, 1, Cb, 1] of values [.., Rb, Cb]."""
    for rows, row_blocks, height in _whole_and_short(x.shape[-2], block[0]):
        for columns, column_blocks, width in _whole_and_short(x.shape[-1], block[1]):
            part = x[..., rows, columns].unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
            yield part, values[..., row_blocks, column_blocks].unsqueeze(-1).unsqueeze(-3)


def _whole_and_short(length: int, size: int) -> Iterator[tuple[slice, slice, int]]:
    """Yields (places, numbers of blocks, size) of the whole blocks of a dimension, then of a short one at its end."""
    count, short = divmod(length, size)
    if count:
        yield slice(0, count * size), slice(0, count), size
    if short:
        yield slice(count * size, length), slice(count, count + 1), short
