"""Numbers in few bits: the type of an element, the blocks that share a scale, and how scales and zeros are kept.

A number is `(code - zero) * scale`, in float32. Elements are floating-point (E4M3 and E5M2 of arXiv:2209.05433, E2M1 of
the OCP Microscaling formats 1.0, E5M6 of DeepSeek-V3, arXiv:2412.19437, section 3.3) or integers of 8 to 2 bits. Casts
to E4M3 differ between releases of torch (2.13 makes 448 of infinity, older ones NaN), so numbers are clamped before.

R, C rows and columns · Rb, Cb blocks of rows and of columns, of which the last ones may be short
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Element = Literal["e4m3", "e5m2", "e5m6", "e2m1", "int8", "int7", "int6", "int5", "int4", "int3", "int2"]
ScaleKind = Literal["float32", "float16", "bfloat16", "power-of-two", "e8m0", "e4m3"]
ZeroKind = Literal["none", "integer", "float"]
Rounding = Literal["up", "floor"]

WHOLE = 0
"""The size of a block that has all rows, or all columns."""
_E4M3_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: a quotient by less may be infinite."""


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
    """integer: codes are unsigned and zero is one of them, so that 0 is exact. float: any number of steps."""
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


@dataclass(frozen=True)
class Scaled:
    """Matrices [.., R, C] in a format."""

    codes: Tensor
    """[.., R, C] in `ElementType.dtype`; of integers with a zero uint8, from 0 on."""
    scales: Tensor
    """[.., Rb, Cb]: float32, or what the format says (e8m0: uint8, the exponent + 127)."""
    format: Format
    zeros: Tensor | None = None
    """[.., Rb, Cb]: uint8 codes, or float32 steps."""
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
        rows, columns = self.shape[-2:]
        block = self.format.block_of(rows, columns)
        numbers = _numbers(self.codes, self.format)

        def of_elements(values: Tensor) -> Tensor:
            if self.groups is None:
                return _for_elements(values, block, rows, columns)
            return _for_elements(values, (block[0], 1), rows, columns).index_select(-1, self.groups)

        if self.zeros is not None:
            numbers = numbers - of_elements(self.zeros.float())
        return (numbers * of_elements(self.wide_scales())).to(dtype)

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


def encode(x: Tensor, form: Format) -> Scaled:
    """Rounds matrices x [.., R, C], of any float dtype, to the nearest numbers of a format, ties to even.

    Blocks with NaN or infinity have a scale that is not finite; `Scaled.wide_scales` shows them, and nothing waits for
    a device here. Of x without elements there are no scales.
    """
    x = x.float()
    if form.zero != "none":
        return _encode_with_zero(x, form, form.block_of(*x.shape[-2:]))
    scales, tensor_scale = scales_of(largest_of_blocks(x, form), form)
    return encode_as(x, Scaled(x, scales, form, tensor_scale=tensor_scale))


def encode_as(x: Tensor, grid: Scaled) -> Scaled:
    """Rounds x [.., R, C] to the nearest numbers that have the scales and zeros of `grid`, a matrix of that size."""
    rows, columns = x.shape[-2:]
    block = grid.format.block_of(rows, columns)
    steps = x.float() / _for_elements(grid.wide_scales(), block, rows, columns)
    if grid.zeros is None:
        return replace(grid, codes=codes_of(steps, grid.format))
    steps = steps + _for_elements(grid.zeros.float(), block, rows, columns)
    return replace(grid, codes=steps.round().clamp(0, 2**grid.format.bits - 1).to(torch.uint8))


def largest_of_blocks(x: Tensor, form: Format) -> Tensor:
    """Returns the largest magnitudes [.., Rb, Cb] in float32 of the blocks of x [.., R, C]."""
    return _grouped(x.abs(), form.block_of(*x.shape[-2:])).amax(dim=(-3, -1)).float()


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
        exponents = _scale_exponents(largest, form)
        stored = (exponents + 127).to(torch.uint8)
        stored = stored.where(largest.isfinite(), 255)  # E8M0's NaN
        return (stored if form.scale == "e8m0" else exponents_to_scales(stored)), None
    scales = (largest / form.largest).clamp_min(_SMALLEST_SCALE)
    return _stored_scales(scales, form.scale), None


def exponents_to_scales(exponents: Tensor) -> Tensor:
    """Returns the float32 powers of two of E8M0 bytes; NaN for 255."""
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - 127)
    return powers.where(exponents != 255, torch.nan)


def codes_of(scaled: Tensor, form: Format) -> Tensor:
    """Returns the codes of numbers in steps of their scale, float32 [..]; those beyond the largest one saturate."""
    of_element = form.of_element
    match form.element:
        case "e2m1":
            magnitude = scaled.abs()
            # Between powers of two, codes are even steps: 1/2 below 2, 1 below 4, 2 from there on.
            above_two = torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round() + 4)
            rounded = torch.where(magnitude < 2, (magnitude * 2).round(), above_two).clamp_max(7)
            return (rounded + 8 * scaled.signbit()).to(torch.uint8)
        case "e5m6":
            _, exponent = torch.frexp(scaled)
            step = torch.ldexp(torch.ones_like(scaled), exponent.clamp_min(-13) - 7)  # 2^-6 of the power of two below
            clamped = (scaled / step).round() * step
            return clamped.clamp(-of_element.largest, of_element.largest).to(torch.bfloat16)
        case "e4m3" | "e5m2":
            return scaled.clamp(-of_element.largest, of_element.largest).to(of_element.dtype)
    half = 2 ** (of_element.bits - 1)
    return scaled.round().clamp(int(form.narrow_range) - half, half - 1).to(torch.int8)


def _encode_with_zero(x: Tensor, form: Format, block: tuple[int, int]) -> Scaled:
    """Encodes between the least and the greatest number of each block, 0 among them."""
    grouped = _grouped(x, block)
    least, greatest = grouped.amin(dim=(-3, -1)).clamp_max(0), grouped.amax(dim=(-3, -1)).clamp_min(0)
    last = 2**form.bits - 1
    scales = ((greatest - least) / last).where(greatest != least, 1).clamp_min(_SMALLEST_SCALE)
    stored = _stored_scales(scales, form.scale)
    zeros = -least / stored.float()
    if form.zero == "integer":
        zeros = zeros.round().clamp(0, last)
    return encode_as(x, Scaled(x, stored, form, zeros.to(torch.uint8) if form.zero == "integer" else zeros))


def _stored_scales(scales: Tensor, kind: ScaleKind) -> Tensor:
    match kind:
        case "float16":
            # No scale becomes zero or infinite; one that is not finite stays so.
            return scales.clamp_min(2.0**-24).where(~scales.isfinite(), scales.clamp(2.0**-24, 65504.0)).half()
        case "bfloat16":
            return scales.bfloat16()
    return scales


def _scale_exponents(largest: Tensor, form: Format) -> Tensor:
    """Returns the exponents, int32, of power-of-two scales of floating-point or integer elements."""
    if form.rounding == "floor":
        _, exponent = torch.frexp(largest)
        return (exponent - 1 - (form.of_element.exponent or math.floor(math.log2(form.largest)))).clamp(-127, 127)
    mantissa, exponent = torch.frexp(largest / form.largest)  # mantissa in [1/2, 1)
    return (exponent - (mantissa == 0.5).int()).clamp(-126, 127)


def _numbers(codes: Tensor, form: Format) -> Tensor:
    """Returns the float32 numbers of codes, in steps of their scale."""
    if form.element != "e2m1":
        return codes.float()
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes.device)
    return values[codes.to(torch.int64)]


def _grouped(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns x [.., R, C] as blocks [.., Rb, rows, Cb, columns]; short ones repeat what they have: a copy, then."""
    rows, columns = x.shape[-2:]
    high, wide = block
    short = -rows % high, -columns % wide
    if any(short):
        x = _repeated_ends(x, short)
    return x.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))


def _repeated_ends(x: Tensor, short: tuple[int, int]) -> Tensor:
    """Returns x with its last row and column repeated, so that neither extremes nor zeros of a block change."""
    flat = x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
    padded = F.pad(flat.float(), (0, short[1], 0, short[0]), mode="replicate")
    return padded.unflatten(0, x.shape[:-2]) if x.ndim > 2 else padded[0]


def _for_elements(values: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Returns values of blocks [.., Rb, Cb] for each element, [.., R, C], or with sizes of one that broadcast."""
    for dim, size, length in ((-2, block[0], rows), (-1, block[1], columns)):
        if values.shape[dim] > 1 and size > 1:
            values = values.repeat_interleave(size, dim=dim).narrow(dim, 0, length)
    return values
