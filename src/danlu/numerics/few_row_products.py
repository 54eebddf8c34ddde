"""Products of a few rows with frozen integers of 8 and 4 bits as they are stored, on a CPU, in bfloat16.

Decoding is bound by the memory that weights take. torch's kernels read each code once, where a matrix that is
dequantized first is read as codes, written, and read again in bfloat16. They add up in float32 and round once; scales,
and zeros in steps of them, are rounded to bfloat16, as the numbers of a dequantized matrix are. One thread of an EPYC
with AVX2, 1 and 16 rows, ms for six matrices [1024, 1024]: bfloat16 1.9 and 22.7, int8 1.1 and 5.7, int4 1.0 and 5.3.

M rows · O, I outputs and inputs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from danlu.numerics.format import Scaled

_INNER_TILES = 2
"""The tiles of a packed int4 matrix along its inputs; kernels of CPUs take any of 2, 4 and 8."""
_INT4_GROUPS = (32, 64, 128, 256)
_INT4_OUTPUTS, _INT4_INPUTS = 16, 32
"""Outputs and inputs of an int4 matrix are multiples of these."""


@dataclass(frozen=True)
class FewRowProduct:
    """The product of few rows with one matrix."""

    multiply: Callable[[Tensor], Tensor]
    """x [M, I] bfloat16 -> [M, O] bfloat16, without a gradient."""
    copied_bytes: int
    """Memory besides that of the matrix: codes in the order of a kernel."""


def few_row_product(weight: Scaled) -> FewRowProduct | None:
    """Returns the product with a matrix [O, I]; None of a format, a size or a machine that no kernel takes."""
    form, (outputs, inputs) = weight.format, weight.shape
    high, wide = form.block_of(outputs, inputs)
    if weight.codes.device.type != "cpu" or weight.groups is not None or high != 1 or weight.tensor_scale is not None:
        return None
    if form.element == "int8" and form.zero == "none" and wide == inputs:
        return _of_int8(weight) if _has_kernels() else None
    fits = wide in _INT4_GROUPS and inputs % wide == 0 and outputs % _INT4_OUTPUTS == 0 and inputs % _INT4_INPUTS == 0
    if form.element == "int4" and form.zero in ("none", "integer") and fits and _has_kernels():
        return _of_int4(weight, wide)
    return None


def _of_int8(weight: Scaled) -> FewRowProduct:
    codes, scales = weight.codes.contiguous(), weight.wide_scales().reshape(-1).to(torch.bfloat16)
    kernel = torch.ops.aten._weight_int8pack_mm
    return FewRowProduct(lambda x: kernel(x.contiguous(), codes, scales), scales.nbytes)


def _of_int4(weight: Scaled, group: int) -> FewRowProduct:
    """The kernel's numbers are (code - 8) scale + zero, with codes from 0 to 15."""
    scales = weight.wide_scales()  # [O, I / group]
    unsigned = weight.codes.to(torch.int32)
    if weight.zeros is None:
        unsigned, zeros = unsigned + 8, torch.zeros_like(scales)
    else:
        zeros = (8 - weight.zeros.to(torch.float32)) * scales
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, _INNER_TILES)
    constants = torch.stack((scales, zeros), dim=2).to(torch.bfloat16).transpose(0, 1).contiguous()
    kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
    return FewRowProduct(lambda x: kernel(x.contiguous(), codes, group, constants), codes.nbytes + constants.nbytes)


@cache
def _has_kernels() -> bool:
    """Whether this torch has the kernels: they are no public functions."""
    names = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")
    return all(hasattr(torch.ops.aten, name) for name in names)
