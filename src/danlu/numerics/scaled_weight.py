"""A frozen matrix in a format of few bits, with its codes packed into bytes: integers, FP8, MXFP8, MXFP4 and NVFP4.

A row of codes is one run of bits (see `packing`), so rows never share a byte: some rows of a matrix are some rows of
bytes, and matrices of one shape and format are one taller matrix.

O, I outputs and inputs · Ob, Ib blocks of them that share a scale, of which the last may be short
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.core.layer_types import QuantizedWeight
from danlu.numerics.few_row_products import FewRowProduct, few_row_product, one_row_product
from danlu.numerics.format import (
    E2M1_VALUES,
    Format,
    Scaled,
    codes_of,
    encode,
    exponents_to_scales,
    largest_of_blocks,
    scales_of,
)
from danlu.numerics.four_bit import tile_size
from danlu.numerics.four_bit_weight import check_quantizable
from danlu.numerics.packing import pack, packed_width, unpack
from danlu.numerics.quantized_weight import QuantizedWeightModule

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TENSORS = ("codes", "scales", "zeros", "tensor_scale", "groups")
_TABLE_BITS = 12
"""Bits of the codes that one look-up decodes, where codes do not fill bytes."""


class ScaledWeight(QuantizedWeightModule):
    """A frozen matrix [O, I] in a `Format` with elements of at most 8 bits."""

    codes: Tensor  # [O, ceil(I bits / 8)] uint8; integers without a zero are shifted by half their range, but for int8
    scales: Tensor  # [Ob, Ib] in the dtype that the format says, but E4M3 as bytes, which every collective knows
    zeros: Tensor | None  # [Ob, Ib] uint8 or float32
    tensor_scale: Tensor | None  # [1, 1] float32
    groups: Tensor | None  # [I] int32: the block of each column, where blocks are not of neighbouring columns

    def __init__(
        self, form: Format, shape: tuple[int, int], dtype: torch.dtype, tensors: Mapping[str, Tensor | None]
    ) -> None:
        """tensors: those of the class, by name, as they are stored; dtype: of the matrix that was encoded."""
        super().__init__()
        self.form = form
        self.shape = shape
        self.dtype = dtype
        for name in _TENSORS:
            self.register_buffer(name, tensors.get(name))

    @classmethod
    def of(cls, scaled: Scaled, dtype: torch.dtype) -> Self:
        """Packs the codes of a matrix; its scales are not copied."""
        outputs, inputs = scaled.shape
        constants = {name: getattr(scaled, name) for name in _TENSORS[2:]}
        tensors = {"codes": _packed(scaled.codes, scaled.format), "scales": _as_bytes(scaled.scales), **constants}
        return cls(scaled.format, (outputs, inputs), dtype, tensors)

    @classmethod
    def quantize(cls, weight: Tensor, form: Format, *, where: str = "a matrix") -> Self:
        """Rounds weight [O, I], of any strides, to the nearest numbers of a format.

        Raises:
            ModelError: `where` is no matrix of float32, bfloat16 or float16, or not all of it is finite.
        """
        check_quantizable(weight, where)
        quantized = cls.rounded(weight.detach(), form)
        if not bool(quantized._wide_scales().isfinite().all()):
            raise ModelError(f"{where} cannot be quantized: it holds NaN or infinite values. Use a sound model.")
        return quantized

    @classmethod
    def rounded(cls, weight: Tensor, form: Format) -> Self:
        """`quantize` without a look at the numbers: those of a block that is not finite are NaN."""
        return cls._by_tiles(weight, form) if form.zero == "none" else cls.of(encode(weight, form), weight.dtype)

    @classmethod
    def _by_tiles(cls, weight: Tensor, form: Format) -> Self:
        """Rounds to the codes of `encode`, without a copy of the whole matrix in float32."""
        outputs, inputs = weight.shape
        high, wide = form.block_of(outputs, inputs)
        tiles = _tiles(outputs, inputs, weight.device, rows=1 if form.block[0] == 0 else high)
        parts = [largest_of_blocks(weight[rows].to(torch.float32), form) for rows in tiles]
        largest = torch.cat(parts) if form.block[0] else torch.stack(parts).amax(dim=0)
        scales, tensor_scale = scales_of(largest, form)
        steps = _wide(scales, tensor_scale, form)
        codes = torch.empty(outputs, packed_width(inputs, form.bits), dtype=torch.uint8, device=weight.device)
        for rows in tiles:
            numbers = weight[rows].to(torch.float32)
            grouped = _by_blocks(numbers, wide) / _of_rows(steps, rows, high).unsqueeze(2)
            codes[rows] = _packed(codes_of(grouped.flatten(1)[:, :inputs], form), form)
        tensors = {"codes": codes, "scales": _as_bytes(scales), "tensor_scale": tensor_scale}
        return cls(form, (outputs, inputs), weight.dtype, tensors)

    def scaled(self) -> Scaled:
        """Returns the matrix with one code in each element."""
        form = self.form
        codes = unpack(self.codes, form.bits, self.shape[1])
        if form.of_element.dtype in _FLOAT8 or _is_signed_bytes(form):
            codes = codes.view(form.of_element.dtype)
        elif form.element != "e2m1" and form.zero == "none":
            codes = (codes.to(torch.int16) - _half(form)).to(torch.int8)
        scales = self.scales.view(torch.float8_e4m3fn) if form.scale == "e4m3" else self.scales
        return Scaled(codes, scales, form, self.zeros, self.tensor_scale, self.groups)

    def shard(self, rows: slice, columns: slice) -> ScaledWeight:
        """Some rows and columns, by the same codes; blocks get smaller where they are cut."""
        return ScaledWeight.of(self.scaled().box(rows, columns), self.dtype)

    def write(self, out: Tensor) -> None:
        zeros = None if self.zeros is None else self.zeros.to(torch.float32)
        block = self.form.block_of(*self.shape)
        _write(out, self.codes, self._wide_scales(), zeros, self.groups, self.form, block)

    def write_stacked(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """See `QuantizedWeightModule`: as one matrix, where no block has rows of two."""
        block = self.form.block_of(*self.shape)
        if "groups" in tensors or self.shape[0] % block[0]:
            super().write_stacked(tensors, out)
            return
        scales = _wide(tensors["scales"], tensors.get("tensor_scale"), self.form).flatten(0, 1)
        zeros = tensors["zeros"].to(torch.float32).flatten(0, 1) if "zeros" in tensors else None
        _write(out.flatten(0, 1), tensors["codes"].flatten(0, 1), scales, zeros, None, self.form, block)

    def few_row_product(self, *below: QuantizedWeight, is_one: bool = False) -> FewRowProduct | None:
        """See `numerics.few_row_products`; not of codes that FSDP shards, nor of matrices of different classes."""
        matrices = [each for each in (self, *below) if isinstance(each, ScaledWeight) and type(each) is type(self)]
        if len(matrices) <= len(below) or any("codes" not in matrix._buffers for matrix in matrices):
            return None
        return (one_row_product if is_one else few_row_product)(*(matrix.scaled() for matrix in matrices))

    def extra_repr(self) -> str:
        return f"{self.form.element}, {super().extra_repr()}"

    def _wide_scales(self) -> Tensor:
        """The scales [Ob, Ib] in float32, with that of the tensor."""
        return _wide(self.scales, self.tensor_scale, self.form)


def _write(
    out: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None,
    form: Format,
    block: tuple[int, int],
) -> None:
    """Dequantizes packed codes into `out` [O, I]: products in float32, rounded once; scales and zeros in float32."""
    outputs, inputs = out.shape
    high, wide = (block[0], 1) if groups is not None else block
    for rows in _tiles(outputs, inputs, out.device):
        numbers = _by_blocks(_numbers(codes[rows], form, inputs), wide)  # [rows, Ib, block], in memory of its own
        for values, apply in ((zeros, numbers.sub_), (scales, numbers.mul_)):
            if values is not None:
                of_rows = _of_rows(values, rows, high)
                apply((of_rows if groups is None else of_rows.index_select(1, groups)).unsqueeze(2))
        out[rows] = numbers.flatten(1)[:, :inputs]


def _numbers(codes: Tensor, form: Format, inputs: int) -> Tensor:
    """Packed codes [R, n] -> their numbers [R, I] float32, in steps of a scale."""
    bits, dtype = form.bits, form.of_element.dtype
    if dtype in _FLOAT8:
        return torch.index_select(_table(form.element, False, codes.device), 0, codes.view(-1).to(torch.int32)).view(
            codes.shape
        )
    if bits == 8:
        return (codes.view(torch.int8) if _is_signed_bytes(form) else codes).to(torch.float32)
    table = _table(form.element, form.zero != "none", codes.device)
    if bits == 4:
        numbers = torch.index_select(table, 0, codes.to(torch.int32).view(-1)).view(torch.float32)
    elif bits == 2:
        numbers = torch.index_select(table, 0, codes.to(torch.int32).view(-1))
    elif bits == 3:
        first, second, third = F.pad(codes, (0, -codes.shape[1] % 3)).to(torch.int32).unflatten(1, (-1, 3)).unbind(2)
        both = torch.stack((first | (second & 15) << 8, second >> 4 | third << 4), dim=2)
        numbers = torch.index_select(table, 0, both.view(-1))
    else:
        numbers = unpack(codes, bits, inputs).to(torch.float32)
        return numbers if form.zero != "none" else numbers.sub_(_half(form))
    return numbers.view(len(codes), -1)[:, :inputs]


@cache
def _table(element: str, has_zero: bool, device: torch.device) -> Tensor:
    """The float32 numbers of codes: of FP8 [256]; of 4 bits two a byte, [256] int64, as they lie in memory; of 2 bits
    [256, 4], four a byte; of 3 bits [4096, 4].
    """
    form = Format(element, (1, 0), zero="integer" if has_zero else "none")  # type: ignore[arg-type]
    if form.of_element.dtype in _FLOAT8:
        return torch.arange(256, dtype=torch.uint8, device=device).view(form.of_element.dtype).to(torch.float32)
    run = torch.arange(2 ** (_TABLE_BITS if form.bits == 3 else 8), device=device)
    together = (_TABLE_BITS if form.bits == 3 else 8) // form.bits
    codes = torch.stack([(run >> (form.bits * place)) & (2**form.bits - 1) for place in range(together)], dim=1)
    if element == "e2m1":
        numbers = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)[codes]
    else:
        numbers = (codes - (0 if has_zero else _half(form))).to(torch.float32)
    return numbers.view(torch.int64).view(-1) if form.bits == 4 else numbers


def _packed(codes: Tensor, form: Format) -> Tensor:
    """Codes [R, I], one in each element -> [R, ceil(I bits / 8)] uint8."""
    if codes.dtype != torch.uint8:
        is_shifted = codes.dtype == torch.int8 and not _is_signed_bytes(form)
        codes = (codes + _half(form)).view(torch.uint8) if is_shifted else codes.view(torch.uint8)
    return pack(codes, form.bits)


def _half(form: Format) -> int:
    """Returns what integers without a zero are shifted by, so that their codes begin with 0."""
    return 1 << (form.bits - 1)


def _is_signed_bytes(form: Format) -> bool:
    return form.element == "int8" and form.zero == "none"


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales


def _wide(scales: Tensor, tensor_scale: Tensor | None, form: Format) -> Tensor:
    """Stored scales [.., Ob, Ib] in float32, with that of the tensor."""
    if form.scale == "e8m0":
        return exponents_to_scales(scales)
    if form.scale == "e4m3":
        scales = scales.view(torch.float8_e4m3fn)
    wide = scales.to(torch.float32)
    return wide if tensor_scale is None else wide * tensor_scale


def _of_rows(values: Tensor, rows: slice, high: int) -> Tensor:
    """Values of blocks [Ob, Ib] for each of some rows, [R, Ib] or [1, Ib]."""
    if high == 1 or len(values) == 1:
        return values[rows] if high == 1 else values
    return values[torch.arange(rows.start, rows.stop, device=values.device) // high]


def _tiles(outputs: int, inputs: int, device: torch.device, rows: int = 1) -> list[slice]:
    """Stretches of outputs to work on at a time, of a multiple of so many rows."""
    size = tile_size(outputs * inputs, device)
    step = max(1, size // inputs if device.type == "cpu" else -(-size // inputs))
    step = -(-step // rows) * rows
    return [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]


def _by_blocks(numbers: Tensor, wide: int) -> Tensor:
    """[R, I] -> [R, Ib, block], with zeros where the last block is short: a view where none is."""
    missing = -numbers.shape[1] % wide
    padded = F.pad(numbers, (0, missing)) if missing else numbers
    return padded.unflatten(1, (-1, wide))
