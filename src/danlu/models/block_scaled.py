"""Weights in 8 and 4 bits with a scale for each block, as they are published: FP8 with blocks of a matrix, and MXFP4.

They are read as transformers dequantises them, and written dense. Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3),
OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import ModelError
from danlu.core.safetensors_format import TensorLocation
from danlu.core.shard_box import ShardBox

if TYPE_CHECKING:
    from torch import Tensor

METHODS = ("fp8", "mxfp4")
"""The `quant_method` values of folders with weights that are dequantised while they are read."""
MX_BLOCK = 32
"""Values that share a scale, along the inputs."""
_FP8, _SCALE = "F8_E4M3", "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_SCALE_TYPES: tuple[str, ...] = ("F32", "BF16", "F16", "F8_E8M0")
_EXPONENT_TYPES: tuple[str, ...] = ("U8",)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class ScaledLocation:
    """The location of a weight [.., O, I] that is stored as small numbers, and of the scales of its blocks.

    FP8: numbers [.., O, I], scales [.., O / rows, I / columns], rounded up. MXFP4: two numbers in a byte, [.., O,
    I / 32, 16], scales [.., O, I / 32] as exponents of two, 127 being 1.
    """

    values: TensorLocation
    scales: TensorLocation
    block: tuple[int, int]  # rows and columns with a scale
    is_mxfp4: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight as its numbers are stored: in MXFP4 the transpose of transformers' experts."""
        stored = self.values.shape
        return (*stored[:-2], stored[-2] * stored[-1] * 2) if self.is_mxfp4 else stored

    @property
    def dtype(self) -> str:
        """The dtype in which no bit of the dequantised weight is lost, as safetensors names it."""
        return "BF16" if self.is_mxfp4 else "F32"

    @property
    def file(self) -> Path:
        """The file of the numbers."""
        return self.values.file

    @property
    def offset(self) -> int:
        """The offset of the numbers in their file."""
        return self.values.offset

    def problem(self) -> str | None:
        """Says why the values and scales do not fit together; None if they do."""
        rows, columns = self.block
        if self.is_mxfp4:
            expected, types = self.values.shape[:-1], _EXPONENT_TYPES
            if len(self.values.shape) < 3 or self.values.shape[-1] * 2 != MX_BLOCK:
                return f"blocks of shape {list(self.values.shape)} are none of {MX_BLOCK // 2} bytes"
        else:
            shape, types = self.values.shape, _SCALE_TYPES
            expected = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
        if self.scales.shape != expected:
            return f"expected scales of shape {list(expected)}, found {list(self.scales.shape)}"
        if self.scales.dtype not in types:
            return f"expected scales of type {' or '.join(types)}, found {self.scales.dtype}"
        return None

    def boxes(self, box: ShardBox) -> tuple[ShardBox, ShardBox]:
        """(of the numbers, of the scales) which a box of the weight is made of, whole blocks along the inputs."""
        rows, columns = self.block
        first, ends = list(box.offsets), list(box.ends)
        scale_first = [*first[:-2], first[-2] // rows, first[-1] // columns]
        scale_ends = [*ends[:-2], -(-ends[-2] // rows), -(-ends[-1] // columns)]
        scales = _box(self.scales.shape, scale_first, scale_ends)
        if self.is_mxfp4:
            half = MX_BLOCK // 2
            return _box(self.values.shape, [*scale_first, 0], [*scale_ends, half]), scales
        return ShardBox(self.values.shape, box.offsets, box.sizes), scales

    def dequantized(self, values: Tensor, scales: Tensor, box: ShardBox) -> Tensor:
        """Dequantises a box of the weight from the values and scales that `boxes` locates, all as they are stored."""
        at, columns = box.offsets, self.block[1]
        if self.is_mxfp4:
            whole = dequantize_mxfp4(values, scales)
            first = at[-1] % columns
            return whole[..., first : first + box.sizes[-1]]
        return dequantize_fp8(values, scales, self.block, (at[-2] % self.block[0], at[-1] % columns))


def _box(shape: tuple[int, ...], first: list[int], ends: list[int]) -> ShardBox:
    return ShardBox(shape, tuple(first), tuple(end - start for start, end in zip(first, ends, strict=True)))


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """E2M1 numbers, two in a byte with the earlier one in the low bits, times a power of two for each block of 32.

    blocks [.., G, 16] uint8, scales [.., G] uint8, exponents above 127 -> [.., G * 32] bfloat16, without rounding.
    """
    import torch

    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.bfloat16)
    numbers = torch.stack([table[(blocks & 0x0F).int()], table[(blocks >> 4).int()]], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).sub_(127).unsqueeze(-1)
    return torch.ldexp(numbers, exponents, out=numbers).flatten(-2)


def dequantize_fp8(values: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)) -> Tensor:
    """FP8 numbers times the scale of their block, in float32.

    values [.., O, I] float8; scales [.., blocks, blocks] of any floating-point type. first: row and column of the first
    number within its block. Returns [.., O, I] float32.
    """
    import torch

    wide = values.to(torch.float32)
    for axis, size, start in ((-2, block[0], first[0]), (-1, block[1], first[1])):
        scales = scales.to(torch.float32).repeat_interleave(size, dim=axis)
        scales = scales.narrow(axis, start, wide.shape[axis])
    return wide.mul_(scales)


def with_scaled(
    stored: Mapping[str, TensorLocation], block: tuple[int, int]
) -> tuple[dict[str, TensorLocation | ScaledLocation], list[str]]:
    """Joins the tensors that make one weight together.

    block: rows and columns with a scale, for FP8. Returns the tensors by name, and messages about those that do not fit
    together.
    """
    named: dict[str, TensorLocation | ScaledLocation] = dict(stored)
    for name, location in stored.items():
        weight = name.removesuffix(_BLOCKS)
        if location.dtype == _FP8 and (scales := stored.get(name + _SCALE)) is not None:
            named[name] = ScaledLocation(location, scales, block, is_mxfp4=False)
            del named[name + _SCALE]
        elif weight != name and location.dtype == "U8" and (scales := stored.get(weight + _SCALES)) is not None:
            del named[name], named[weight + _SCALES]
            named[weight] = ScaledLocation(location, scales, (1, MX_BLOCK), is_mxfp4=True)
    scaled = ((name, location) for name, location in named.items() if isinstance(location, ScaledLocation))
    return named, [f"{name} in {each.file.name}: {problem}" for name, each in scaled if (problem := each.problem())]


def scaled_method(values: Mapping[str, Any]) -> str | None:
    """Returns the method by which weights are dequantised while they are read, by a config.json: one of `METHODS`, or
    None.
    """
    settings = values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    return method if method in METHODS else None


def fp8_block(values: Mapping[str, Any], where: str) -> tuple[int, int]:
    """The rows and columns that have a scale, by the quantization_config of a config.json; 128 x 128 where it has none.

    Raises ModelError for FP8 without blocks, or of another kind than E4M3.
    """
    if scaled_method(values) != "fp8":
        return (128, 128)
    settings = values["quantization_config"]
    block = settings.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block)
    if not is_block or settings.get("fmt", "e4m3") != "e4m3":
        raise ModelError(
            f"{where}: quantization_config: of FP8 danlu reads E4M3 with a scale for each block (weight_block_size: "
            f"[128, 128]), not fmt {settings.get('fmt')!r} with weight_block_size {block!r}. Use the original weights"
        )
    assert isinstance(block, list)
    return (block[0], block[1])
