"""Grouped products in few sizes on a CPU: the same bits as torch's, for few kernels, and none of a neighbour's rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.models import grouped_mm as grouped
from danlu.models.grouped_mm import grouped_mm, grouped_weight_gradient

COUNTS = torch.tensor([0, 5, 33, 0, 64, 1, 100, 17, 0])
ROWS, INPUTS, OUTPUTS = int(COUNTS.sum()), 48, 24


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class _Products(TorchDispatchMode):
    """Notes the sizes of all products [M, K] @ [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, int, int]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            left, right = args
            self.sizes.add((*left.shape, right.shape[1]))
        return func(*args, **(kwargs or {}))


@contextmanager
def products() -> Iterator[set[tuple[int, int, int]]]:
    with _Products() as mode:
        yield mode.sizes


@pytest.mark.parametrize("transposed", [False, True])
def test_products_in_few_sizes_are_torchs_to_the_bit(transposed: bool) -> None:
    rows, weight = drawn(ROWS, INPUTS).bfloat16(), drawn(len(COUNTS), OUTPUTS, INPUTS, seed=1)
    matrices = weight.transpose(1, 2) if transposed else weight.transpose(1, 2).contiguous()
    got = grouped_mm(rows, matrices, COUNTS)
    want = F.grouped_mm(rows, matrices.bfloat16(), offs=COUNTS.cumsum(0, dtype=torch.int32))
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    assert not torch.equal(got, grouped_mm(rows, matrices, COUNTS.flip(0)))  # control: rows of other groups


def test_gradients_of_weights_are_sums_over_a_groups_own_rows() -> None:
    grad, rows = drawn(ROWS, OUTPUTS).bfloat16(), drawn(ROWS, INPUTS, seed=1).bfloat16()
    got = grouped_weight_gradient(grad, rows, COUNTS, torch.float32)
    sizes = COUNTS.tolist()
    of_groups = zip(grad.double().split(sizes), rows.double().split(sizes), strict=True)
    want = torch.stack([left.t() @ right for left, right in of_groups])
    assert got.dtype == torch.float32 and not got[COUNTS == 0].any()
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=1e-3)  # rounded to bfloat16 once
    moved = grouped_weight_gradient(grad.roll(1, 0), rows, COUNTS, torch.float32)
    assert (moved.double() - want).abs().max() > 1  # control: one row beside its place


@pytest.mark.parametrize("expert", [4, 7])
def test_an_infinite_row_stays_in_its_group(expert: int) -> None:
    """Rows of the next group stand behind those of one that is filled up: nothing of theirs may be in its results."""
    start = int(COUNTS[:expert].sum())
    rows, grad = drawn(ROWS, INPUTS).bfloat16(), drawn(ROWS, OUTPUTS, seed=1).bfloat16()
    rows[start] = torch.inf
    y = grouped_mm(rows, drawn(len(COUNTS), INPUTS, OUTPUTS, seed=2), COUNTS)
    gradients = grouped_weight_gradient(grad, rows, COUNTS, torch.float32)
    assert y.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [start]
    assert gradients.isfinite().all((1, 2)).logical_not().nonzero().flatten().tolist() == [expert]


def test_all_numbers_of_rows_are_multiplied_in_few_sizes() -> None:
    """Of each size oneDNN keeps a kernel, of 0.8 MiB."""
    weight = drawn(1, INPUTS, OUTPUTS)
    with products() as forward:
        for count in range(1, 257):
            grouped_mm(drawn(count, INPUTS).bfloat16(), weight, torch.tensor([count]))
    assert {size for size, _, _ in forward} == {1, 2, 4, 8, 16, *range(32, 257, 32)}
    with products() as backward:
        for count in range(1, 257):
            grad, rows = drawn(count, OUTPUTS).bfloat16(), drawn(count, INPUTS).bfloat16()
            grouped_weight_gradient(grad, rows, torch.tensor([count]), torch.float32)
    assert {size for _, size, _ in backward} == {1, 2, 4, 8, 16, *range(32, 257, 32)}


@pytest.mark.parametrize("counts", [[5, 0, 40, 0], [0, 0, 0, 33], [0, 0, 0, 0]])
def test_groups_without_rows_have_no_products_and_gradients_of_zeros(counts: list[int]) -> None:
    given = torch.tensor(counts)
    rows, grad = (drawn(sum(counts), width).bfloat16() for width in (INPUTS, OUTPUTS))
    with products() as sizes:
        y = grouped_mm(rows, drawn(len(counts), INPUTS, OUTPUTS), given)
    assert y.shape == (sum(counts), OUTPUTS) and y.isfinite().all() and len(sizes) == given.count_nonzero()
    freed = torch.full((len(counts), OUTPUTS, INPUTS), torch.nan)  # whose memory is likely to be taken again
    del freed
    gradients = grouped_weight_gradient(grad, rows, given, torch.float32)
    assert (gradients.flatten(1).abs().sum(1) > 0).tolist() == [count > 0 for count in counts]


def test_float32_is_multiplied_as_it_is() -> None:
    """Its library keeps no kernels: nothing is filled up for it."""
    rows, weight = drawn(ROWS, INPUTS), drawn(len(COUNTS), INPUTS, OUTPUTS, seed=1)
    want = F.grouped_mm(rows, weight, offs=COUNTS.cumsum(0, dtype=torch.int32))
    assert torch.equal(grouped_mm(rows, weight, COUNTS), want)
    assert not grouped._takes_few_sizes(rows) and grouped._takes_few_sizes(rows.bfloat16())
