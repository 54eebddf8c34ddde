"""Stacked quantized matrices: each has the codes and values that it has alone, wherever and beside whatever it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from builders.scaled_formats import FORMATS, OF_FILES
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.numerics import quantized_weight
from danlu.numerics.four_bit_weight import FourBitWeight, unpack_kernels
from danlu.numerics.quantized_weight import StackedWeight
from danlu.numerics.scaled_weight import ScaledWeight

KINDS = {
    "nf4": FourBitWeight.quantize,
    "nf4, one constant for each block": partial(FourBitWeight.quantize, double=False),
    "fp4": partial(FourBitWeight.quantize, kind="fp4", block=32),
    **{name: partial(ScaledWeight.quantize, form=form) for name, form in (FORMATS | OF_FILES).items()},
}
COUNT = 5
SHAPES = [(48, 80), (130, 130), (5, 27)]
"""Of a whole number of blocks; of more blocks than share an 8-bit scale, the last one short; of an odd number."""


def matrices(shape: tuple[int, int], count: int = COUNT) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = torch.arange(1, count + 1).view(-1, 1, 1)  # so that each has other constants
    return torch.randn(count, *shape, generator=generator) * sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_matrix_has_the_bits_that_it_has_alone(kind: str, shape: tuple[int, int]) -> None:
    alone = [KINDS[kind](matrix) for matrix in matrices(shape)]
    stack = StackedWeight(alone)
    assert (
        stack.shape == shape and stack.count == COUNT and stack.stored_bytes() == sum(w.stored_bytes() for w in alone)
    )
    for dtype in (torch.float32, torch.bfloat16):
        expected = torch.stack([weight.dense(dtype) for weight in alone])
        assert torch.equal(stack.dense(dtype), expected)
        assert torch.equal(torch.stack([stack.matrix(index).dense(dtype) for index in range(COUNT)]), expected)
        with stack.in_workspace(dtype) as dense, stack.matrix_in_workspace(2, dtype) as third:
            assert torch.equal(dense, expected) and torch.equal(third, expected[2])
        assert not torch.equal(stack.dense(dtype), expected.roll(1, 0))
    for name, tensor in alone[1].named_buffers():
        assert torch.equal(stack.get_buffer(name)[1], tensor)
    # The control: quantized in one piece, a matrix shares blocks or their scales with the next one.
    if kind == "nf4":
        together = KINDS[kind](matrices(shape).flatten(0, 1)).dense(torch.float32)
        assert not torch.equal(together.view(COUNT, *shape), stack.dense(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_shards_hold_the_same_numbers(kind: str) -> None:
    stack = StackedWeight([KINDS[kind](matrix) for matrix in matrices((48, 96))])
    dense = stack.dense(torch.float32)
    assert torch.equal(stack.part(1, 3).dense(torch.float32), dense[1:4])
    assert torch.equal(stack.shard(slice(16, 32), slice(0, 96)).dense(torch.float32), dense[:, 16:32])
    assert torch.equal(stack.shard(slice(0, 48), slice(48, 96)).dense(torch.float32), dense[:, :, 48:])
    assert stack.part(1, 3).codes.untyped_storage().nbytes() < stack.codes.untyped_storage().nbytes()


def test_values_of_a_codebook_in_a_file_are_those_of_their_own_matrix() -> None:
    """Folders may hold other values than the usual ones for what scales are quantized to."""
    alone = [FourBitWeight.quantize(matrix) for matrix in matrices((48, 80))]
    for index, weight in enumerate(alone):
        weight.nested_values = torch.linspace(-1, 1, 256) * (1 + index)
    stack = StackedWeight(alone)
    assert torch.equal(stack.dense(), torch.stack([weight.dense() for weight in alone]))


def test_matrices_of_other_formats_are_not_stacked() -> None:
    first, *_ = matrices((48, 80))
    plain, double = (FourBitWeight.quantize(first, double=double) for double in (False, True))
    with pytest.raises(ModelError, match="experts of layer 3: matrix 1 is quantized in another way than the first one"):
        StackedWeight([plain, double], where="experts of layer 3")
    with pytest.raises(ModelError, match="in another way"):
        StackedWeight([plain, FourBitWeight.quantize(first, double=False, block=32)])


def test_one_matrix_is_dense_at_a_time() -> None:
    stack = StackedWeight([FourBitWeight.quantize(matrix) for matrix in matrices((48, 80))])
    quantized_weight._spare.clear()
    for index in range(COUNT):
        with stack.matrix_in_workspace(index, torch.float32):
            pass
    assert quantized_weight.dense_workspace_bytes() == 4 * stack.workspace_elements == 4 * 48 * 80
    with stack.in_workspace(torch.float32):
        pass
    assert quantized_weight.dense_workspace_bytes() == 4 * stack.to("meta").workspace_elements == COUNT * 4 * 48 * 80


def test_it_is_told_what_unpacks_them_and_constants_keep_their_types() -> None:
    stack = StackedWeight([FourBitWeight.quantize(matrix) for matrix in matrices((48, 80))])
    expected = stack.dense(torch.float32)
    model = nn.Sequential(stack).half()
    assert torch.equal(stack.dense(torch.float32), expected)
    assert unpack_kernels(model, torch.bfloat16) == unpack_kernels(nn.Sequential(stack.matrix(0)), torch.bfloat16) != []
    stack.share_codes()
    assert [name for name, _ in model.named_parameters()] == ["0.codes"]
    assert torch.equal(stack.dense(torch.float32), expected)
