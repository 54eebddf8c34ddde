"""Products of a few rows with frozen integers of 8 and 4 bits as they are stored, on a CPU, in bfloat16.

Decoding is bound by the memory that weights take. torch's kernels read each code once, where a matrix that is
dequantized first is read as codes, written, and read again in bfloat16. They add up in float32 and round once; scales,
and zeros in steps of them, are rounded to bfloat16, as the numbers of a dequantized matrix are. One thread of an EPYC
with AVX2, 1 and 16 rows, ms for six matrices [1024, 1024]: bfloat16 1.9 and 22.7, int8 1.1 and 5.7, int4 1.0 and 5.3.
A single row has a faster kernel for int8 (`one_row_product`).

M rows · O, I outputs and inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.numerics.format import Scaled

_TILE = 96
"""Outputs of a tile of int8: as many float32 as 12 of the 16 registers of AVX2 hold. One row, [2816, 1024], 12 matrices
in turn, a busy machine, ms: 64 outputs 0.45, 88 0.37, 96 0.34, 120 0.39, 176 0.46; the kernel of few rows 0.67."""
_INNER_TILES = 2
"""The tiles of a packed int4 matrix along its inputs; kernels of CPUs take any of 2, 4 and 8."""
_INT4_GROUPS = (32, 64, 128, 256)
_INT4_OUTPUTS, _INT4_INPUTS = 16, 32
"""Outputs and inputs of an int4 matrix are multiples of these."""


@dataclass(frozen=True)
class FewRowProduct:
    """The product of few rows with a matrix, or with several that lie one below the other."""

    multiply: Callable[[Tensor], Tensor]
    """x [M, I] bfloat16 -> [M, O] bfloat16, without a gradient."""
    copied_bytes: int
    """Memory besides that of the matrix: codes in the order of a kernel."""


def few_row_product(*weights: Scaled) -> FewRowProduct | None:
    """Returns the product with matrices [O, I] of the same inputs, one below the other -> [M, O of all].

    None of formats, sizes and machines that no kernel takes, of several matrices that are stored in different ways, and
    of several in int8, which would have to be copied for it.
    """
    first = weights[0]
    if not _has_kernels() or any(not _alike(first, weight) for weight in weights[1:]):
        return None
    if len(weights) == 1 and _is_int8_by_rows(first):
        return _of_int8(first)
    return _of_int4(weights) if all(map(_is_int4_by_groups, weights)) else None


def one_row_product(*weights: Scaled) -> FewRowProduct | None:
    """Returns the product of a single row with matrices [O, I] in int8 by rows, one below the other -> [1, O of all].

    FBGEMM's weighted sums of embeddings in bytes are such products: the outputs in tiles, each of which is a table with
    a row for each input, and x the weights of its rows. It reads memory from beginning to end, where the kernel of few
    rows reads four rows at a time. Sums are float32, and so are scales. None of other formats, and of processors on
    which the kernel was not measured.
    """
    has_one_width = len({weight.shape[1] for weight in weights}) == 1
    if not (_sums_embeddings() and has_one_width and all(map(_is_int8_by_rows, weights))):
        return None
    codes = _below(weight.codes for weight in weights)
    scales = _below(weight.wide_scales().reshape(-1) for weight in weights)
    (outputs, inputs), tiles = codes.shape, -(-len(codes) // _TILE)
    unsigned = F.pad((codes.to(torch.int16) + 128).to(torch.uint8), (0, 0, 0, tiles * _TILE - outputs))
    # The kernel's numbers are code * scale + bias, two float32 behind the codes of a row.
    scale_and_bias = torch.tensor([1.0, -128.0]).view(torch.uint8).expand(tiles, inputs, 8)
    table = torch.cat((unsigned.view(tiles, _TILE, inputs).transpose(1, 2), scale_and_bias), dim=2).flatten(0, 1)
    rows, tile_starts = _rows_of_tiles(tiles, inputs)
    kernel = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default

    def multiply(x: Tensor) -> Tensor:
        row_weights = x.float().expand(tiles, inputs).reshape(-1)
        sums = kernel(table, rows, tile_starts, False, 0, False, row_weights, None, False)  # [tiles, _TILE]
        return (sums.view(1, -1)[:, :outputs] * scales).to(torch.bfloat16)

    return FewRowProduct(multiply, table.nbytes + scales.nbytes)


@lru_cache(maxsize=16)
def _rows_of_tiles(tiles: int, inputs: int) -> tuple[Tensor, Tensor]:
    """The rows of a table [tiles * I] int32, and the first one of each tile."""
    return torch.arange(tiles * inputs, dtype=torch.int32), torch.arange(0, tiles * inputs, inputs, dtype=torch.int32)


def _alike(first: Scaled, second: Scaled) -> bool:
    """Whether two matrices are stored in the same way, and read the inputs in the same order."""
    if first.format != second.format or first.shape[1] != second.shape[1]:
        return False
    if first.groups is None or second.groups is None:
        return first.groups is second.groups
    return torch.equal(first.groups, second.groups)


def _has_rows_alone(weight: Scaled) -> bool:
    """Whether no scale on a CPU is of several rows."""
    high, _ = weight.format.block_of(*weight.shape)
    return weight.codes.device.type == "cpu" and high == 1 and weight.tensor_scale is None


def _is_int8_by_rows(weight: Scaled) -> bool:
    form, (outputs, inputs) = weight.format, weight.shape
    is_int8 = form.element == "int8" and form.zero == "none" and weight.groups is None
    return is_int8 and form.block_of(outputs, inputs)[1] == inputs and _has_rows_alone(weight)


def _is_int4_by_groups(weight: Scaled) -> bool:
    form, (outputs, inputs) = weight.format, weight.shape
    wide = form.block_of(outputs, inputs)[1]
    if form.element != "int4" or form.zero not in ("none", "integer") or not _has_rows_alone(weight):
        return False
    if wide not in _INT4_GROUPS or inputs % wide or outputs % _INT4_OUTPUTS or inputs % _INT4_INPUTS:
        return False
    if weight.groups is None:
        return True
    of_groups = torch.bincount(weight.groups.long(), minlength=inputs // wide)
    return bool((of_groups == wide).all())  # and of no more groups, as there are just so many columns


def _of_int8(weight: Scaled) -> FewRowProduct:
    codes, scales = weight.codes.contiguous(), weight.wide_scales().reshape(-1).to(torch.bfloat16)
    kernel = torch.ops.aten._weight_int8pack_mm.default
    return FewRowProduct(lambda x: kernel(x.contiguous(), codes, scales), scales.nbytes)


def _of_int4(weights: Sequence[Scaled]) -> FewRowProduct:
    """The kernel's numbers are (code - 8) scale + zero, with codes from 0 to 15.

    Columns of groups that are not neighbours (GPTQ's act_order) are brought together, and so are those of x.
    """
    group, groups = weights[0].format.block_of(*weights[0].shape)[1], weights[0].groups
    order = None if groups is None else torch.argsort(groups, stable=True)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    codes = packed(_below(_unsigned(weight, order) for weight in weights), _INNER_TILES)
    constants = _below(map(_scales_and_zeros, weights)).transpose(0, 1).contiguous()  # [I / group, O, 2]
    kernel = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    copied_bytes = codes.nbytes + constants.nbytes
    if order is None:
        return FewRowProduct(lambda x: kernel(x.contiguous(), codes, group, constants), copied_bytes)
    return FewRowProduct(
        lambda x: kernel(x.index_select(1, order), codes, group, constants), copied_bytes + order.nbytes
    )


def _unsigned(weight: Scaled, order: Tensor | None) -> Tensor:
    """The codes [O, I] int32 from 0 to 15, with their columns in an order [I]."""
    codes = weight.codes.to(torch.int32)
    codes = codes + 8 if weight.zeros is None else codes
    return codes if order is None else codes.index_select(1, order)


def _scales_and_zeros(weight: Scaled) -> Tensor:
    """[O, I / group, 2] bfloat16"""
    scales = weight.wide_scales()
    zeros = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.to(torch.float32)) * scales
    return torch.stack((scales, zeros), dim=2).to(torch.bfloat16)


def _below(parts: Iterable[Tensor]) -> Tensor:
    """Tensors [O, ..], one below the other; one alone is not copied."""
    first, *others = parts
    return torch.cat((first, *others)) if others else first


@cache
def _sums_embeddings() -> bool:
    """Whether FBGEMM sums embeddings here with the registers that `_TILE` is made for."""
    has_kernel = hasattr(torch.ops.quantized, "embedding_bag_byte_rowwise_offsets")
    is_measured = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return is_measured and has_kernel and "fbgemm" in torch.backends.quantized.supported_engines


@cache
def _has_kernels() -> bool:
    """Whether this torch has the kernels: they are no public functions."""
    names = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")
    return all(hasattr(torch.ops.aten, name) for name in names)
