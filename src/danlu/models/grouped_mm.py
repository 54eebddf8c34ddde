"""Products of groups of rows, each group with a matrix of its own, as experts make them.

On a CPU oneDNN makes products of half precision, and generates code for each number of rows that it meets. Experts have
other numbers in every micro-batch: 8192 rows among 32 experts, in bfloat16, took twice as long as the same numbers of
rows again and again, and the code 0.8 GiB (it keeps 1024 kernels). So there each group is multiplied in one of few
sizes: 9 ms in place of 19 to 25, and 5 MiB (one thread of a Zen 4, [256, 256] each, 24 draws of counts, 2026-11). The
products of rows beyond a group's own are not used, and the others have the same bits. There, too, the matrix of a group
is cast when its turn comes, in the processor's cache: 0.4 ms for the 32, less than keeping copies would save.

N rows · K contracted · M columns · G groups
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.layer_types import StackedQuantizedWeight

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = 16  # that strides of a grouped product have to be multiples of
_ROW_MULTIPLE = 32


def grouped_mm(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """rows [N, K] times matrices [G, K, M], cast to the type of rows -> [N, M] in that type.

    counts [G] int64: the first counts[0] rows belong to the first matrix, and so on; N in all.

    By torch's grouped product where it takes such tensors, which on a GPU does not wait for the counts; else group by
    group. On a CPU both give the same bits.
    """
    if _takes_few_sizes(rows):
        return _by_group(rows, matrices, counts)
    matrices = matrices.to(rows.dtype)
    if rows.dtype in _TYPES and _has_aligned_rows(rows) and _has_aligned_rows(matrices):
        return F.grouped_mm(rows, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    groups = zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([group @ matrix for group, matrix in groups])


def quantized_grouped_mm(
    rows: Tensor, weight: StackedQuantizedWeight, counts: Tensor, *, transposed: bool = False
) -> Tensor:
    """`grouped_mm` with matrices [G, K, M] that are dequantized for it; the same bits as with dense ones.

    transposed: they are stored as [G, M, K]. On a CPU they are dequantized one by one, in memory that all products
    share, and those of groups without rows are not; elsewhere all at once, since how many rows a group has is known
    to the device alone.
    """
    if rows.device.type != "cpu":
        with weight.in_workspace(rows.dtype) as matrices:
            return grouped_mm(rows, matrices.transpose(1, 2) if transposed else matrices, counts)
    y = rows.new_empty(len(rows), weight.shape[0] if transposed else weight.shape[1])
    for index, group in enumerate(_slices(counts)):
        if group.start == group.stop:
            continue
        with weight.matrix_in_workspace(index, rows.dtype) as matrix:
            y[group] = _product_of_group(rows, group, matrix.t() if transposed else matrix)
    return y


def grouped_weight_gradient(grad: Tensor, rows: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes grad [N, M] transposed times rows [N, K], by groups of the contracted rows -> [G, M, K] in `dtype`.

    Zero for a group without rows.
    """
    if _takes_few_sizes(rows):
        return _gradients_by_group(grad, rows, counts, dtype)
    if rows.dtype in _TYPES and _has_aligned_rows(grad) and _has_aligned_rows(rows):
        return F.grouped_mm(grad.t(), rows, offs=counts.cumsum(0, dtype=torch.int32)).to(dtype)
    sizes = counts.tolist()
    groups = zip(grad.split(sizes), rows.split(sizes), strict=True)
    return torch.stack([of_outputs.t() @ group for of_outputs, group in groups]).to(dtype)


def _by_group(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """`grouped_mm` in few sizes. Behind a group's rows stand those of the next ones, and zeros behind the last.

    Products are written where they belong, and their rows beyond the group's are overwritten by the next ones.
    """
    products = [
        (matrix, _filled(group))
        for matrix, group in zip(matrices, _slices(counts), strict=True)
        if group.start < group.stop
    ]
    y = rows.new_empty(max((place.stop for _, place in products), default=0), matrices.shape[2])
    for matrix, place in products:
        torch.mm(_with_zeros(rows[place], place.stop - place.start), matrix.to(rows.dtype), out=y[place])
    return y[: len(rows)]


def _product_of_group(rows: Tensor, group: slice, matrix: Tensor) -> Tensor:
    """The rows of a group times its matrix [K, M], in one of few sizes where products take such."""
    if not _takes_few_sizes(rows):
        return rows[group] @ matrix
    place = _filled(group)
    return (_with_zeros(rows[place], place.stop - place.start) @ matrix)[: group.stop - group.start]


def _gradients_by_group(grad: Tensor, rows: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """`grouped_weight_gradient` in few sizes: zeros behind a group's rows add nothing to its sums."""
    gradients = rows.new_empty((len(counts), grad.shape[1], rows.shape[1]), dtype=dtype)
    for gradient, group in zip(gradients, _slices(counts), strict=True):
        if group.start == group.stop:
            gradient.zero_()
            continue
        size = _padded_size(group.stop - group.start)
        gradient.copy_(_with_zeros(grad[group], size).t() @ _with_zeros(rows[group], size))
    return gradients


def _takes_few_sizes(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype in (torch.bfloat16, torch.float16)


def _slices(counts: Tensor) -> Iterator[slice]:
    """The rows of each group."""
    ends = itertools.accumulate(counts.tolist(), initial=0)
    return (slice(start, end) for start, end in itertools.pairwise(ends))


def _filled(group: slice) -> slice:
    """The rows that are multiplied for those of a group; some may be beyond the last of all."""
    return slice(group.start, group.start + _padded_size(group.stop - group.start))


def _padded_size(rows: int) -> int:
    """Returns the padded number of rows for a product: a multiple of 32, of 64 beyond 512, of 128 beyond 1024 and so
    on, or a power of two for a few of decoding.

    Multiples of 16 took 15 % longer, for more kernels, and 64 20 %, for more rows (as above). Each size of each of the
    three products takes 0.5 MiB as long as the process lives (torch 2.13, [256, 256]), so there are eight to a power of
    two at the most.
    """
    if rows <= _ROW_MULTIPLE:
        return 1 << (rows - 1).bit_length()
    multiple = max(_ROW_MULTIPLE, 1 << (rows - 1).bit_length() - 4)
    return -(-rows // multiple) * multiple


def _with_zeros(rows: Tensor, size: int) -> Tensor:
    """Pads rows [N, K] with zeros to [size, K]; returns them as they are where they have that size."""
    return rows if len(rows) == size else F.pad(rows, (0, 0, 0, size - len(rows)))


def _has_aligned_rows(matrices: Tensor) -> bool:
    """Whether the rows, or columns, of matrices begin at multiples of the bytes that a grouped product asks for."""
    strides = matrices.stride()[-2:]
    step = max(strides) if 1 in strides else 1
    return step * matrices.element_size() % _BYTES == 0
