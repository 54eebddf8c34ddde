"""Weights in 8 bits or fewer with a scale for each block, as they are published, located by the headers of a folder.

FP8 with blocks of a matrix, and MXFP4, are dequantised here as transformers does. The tensors of other methods become a
weight by a layout that the caller hands in (`FolderLayouts`), for this room knows no formats. All are written dense.
Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3), OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from danlu.core.errors import ModelError
from danlu.core.safetensors_format import TensorLocation
from danlu.core.shard_box import ShardBox

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.models.hf_layout import HFTensor

METHODS = ("fp8", "mxfp4")
"""The `quant_method` values of folders with weights that are dequantised while they are read."""
CODED_METHODS = ("compressed-tensors", "awq", "gptq")
"""The `quant_method` values of folders with weights that a layout of `FolderLayouts` reads."""
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


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix [O, I] as a `ScaledLocation` has it: numbers, and the scales of blocks of so many rows and columns."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    is_mxfp4: bool


class Codes(Protocol):
    """A weight [O, I] as codes with scales."""

    def decode(self) -> Tensor: ...  # its numbers, float32


class WeightLayout(Protocol):
    """How the tensors of one weight [O, I] lie in a folder; all are named by the ends of their names."""

    def shape(self, shapes: Mapping[str, tuple[int, ...]], stored_shape: tuple[int, int] | None) -> tuple[int, int]: ...

    def read(self, tensors: Mapping[str, Tensor], where: str) -> Codes: ...


class FolderLayouts(Protocol):
    """How a folder stores its quantized weights."""

    @property
    def method(self) -> str: ...  # `quant_method` of its config.json

    def of(self, module: str) -> WeightLayout | None: ...  # by the module's name in the folder


@dataclass(frozen=True, eq=False)
class CodedLocation:
    """The location of a weight [O, I] in several tensors, which a layout reads."""

    layout: WeightLayout
    tensors: Mapping[str, TensorLocation]
    """The tensors by the ends of their names ("qweight")."""
    shape: tuple[int, ...]

    @property
    def codes(self) -> TensorLocation:
        """The location of the codes."""
        return next(self.tensors[end] for end in _CODES if end in self.tensors)

    @property
    def dtype(self) -> str:
        """The dtype of the dense weight, as safetensors names it."""
        return "F32"

    @property
    def file(self) -> Path:
        """The file of the codes."""
        return self.codes.file

    @property
    def offset(self) -> int:
        """The offset of the codes in their file."""
        return self.codes.offset


StoredLocation = TensorLocation | ScaledLocation | CodedLocation
"""The location of a weight as a folder stores it."""
_CODES = ("weight_packed", "qweight", "weight")
_ENDS = (
    *(*_CODES, "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx"),
    *("qzeros", "scales", "g_idx"),
)
_OF_ACTIVATIONS = (
    *(f"{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point", "global_scale", "g_idx")),
    *(f"{side}_{what}" for side in ("q", "k", "v") for what in ("scale", "zero_point")),
)
"""Ends of the names of constants for the activations, and the cached keys and values, of a kernel: they change no
weight, and danlu computes these in the type of activations."""


def with_codes(
    stored: Mapping[str, StoredLocation], layouts: FolderLayouts, full_name: Callable[[str], str]
) -> tuple[dict[str, StoredLocation], list[str]]:
    """Joins the tensors that make one weight together by the layouts of a folder.

    full_name: the name in the folder of a tensor. Returns the tensors by name, without constants for activations, and
    messages about those that do not fit together.
    """
    named = {name: each for name, each in stored.items() if name.rpartition(".")[2] not in _OF_ACTIVATIONS}
    problems = []
    for name, location in stored.items():
        module, _, end = name.rpartition(".")
        if end not in _CODES or (end == "weight" and location.dtype not in ("I8", _FP8)):
            continue
        layout = layouts.of(full_name(name).rpartition(".")[0])
        parts = {each: part for each in _ENDS if isinstance(part := stored.get(f"{module}.{each}"), TensorLocation)}
        for each in parts:
            named.pop(f"{module}.{each}", None)
        try:
            if layout is None:
                raise ModelError("quantization_config of config.json has no settings for it")
            shape = layout.shape({each: part.shape for each, part in parts.items()}, _two(parts.get("weight_shape")))
            named[f"{module}.weight"] = CodedLocation(layout, parts, shape)
        except (ModelError, OSError, struct.error) as error:
            problems.append(f"{module} in {location.file.name}: {error}")
    return named, problems


def _two(location: TensorLocation | None) -> tuple[int, int] | None:
    """The numbers of a tensor of two, int64 or int32. Raises ModelError for another one."""
    if location is None:
        return None
    if location.dtype not in ("I64", "I32") or location.shape != (2,):
        raise ModelError(f"weight_shape is {location.dtype} of shape {list(location.shape)}, not two integers")
    with location.file.open("rb") as file:
        file.seek(location.offset)
        first, second = struct.unpack("<2q" if location.dtype == "I64" else "<2i", file.read(location.bytes))
    return first, second


def is_zero(location: TensorLocation) -> bool:
    """Whether all bytes of a small tensor are zero."""
    with location.file.open("rb") as file:
        file.seek(location.offset)
        return not any(file.read(location.bytes))


def keepable(located: Iterable[tuple[HFTensor, StoredLocation]]) -> set[str]:
    """The parameters that can keep the codes of a folder: those whose tensors each have codes, and whole rows of them
    in the parameter's own order."""
    kept: dict[str, bool] = {}
    for tensor, location in located:
        matrices = {(part.parameter, part.box.offsets[:-2]) for part in tensor.parts}
        is_mxfp4 = isinstance(location, ScaledLocation) and location.is_mxfp4
        is_matrix = not isinstance(location, TensorLocation) and len(tensor.shape) == 2
        of_rows = (is_mxfp4 or is_matrix) and len(matrices) == len(tensor.parts)
        of_rows = of_rows and all(
            # Rows of MXFP4 have scales of their own, so rows that take turns have them too.
            (part.is_plain or (is_mxfp4 and not part.transposed and part.axis == len(tensor.shape) - 2))
            and part.box.sizes[-1] == tensor.shape[-1]
            for part in tensor.parts
        )
        for part in tensor.parts:
            whole = part.box.sizes[-2:] == part.box.global_shape[-2:]
            kept[part.parameter] = kept.get(part.parameter, True) and of_rows and whole
    return {name for name, can_be in kept.items() if can_be}


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


def quantization_method(values: Mapping[str, Any]) -> str | None:
    """The `quant_method` of a config.json; None where it names none."""
    settings = values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    return method if isinstance(method, str) else None


def scaled_method(values: Mapping[str, Any]) -> str | None:
    """Returns the method by which weights are dequantised while they are read, by a config.json: one of `METHODS`, or
    None.
    """
    method = quantization_method(values)
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
