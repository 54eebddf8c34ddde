"""A part of a packed matrix is the same numbers, wherever it is cut."""

from __future__ import annotations

import pytest
import torch
from builders.scaled_formats import FORMATS, OF_FILES

from danlu.numerics.four_bit import BLOCKS
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.numerics.quantized_weight import QuantizedWeightModule
from danlu.numerics.scaled_weight import ScaledWeight

SHAPES = [(8, 256), (12, 96), (6, 80), (10, 27), (512, 128)]


def weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def packed(kind: str, shape: tuple[int, int]) -> QuantizedWeightModule:
    match kind:
        case "nf4" | "fp4":
            return FourBitWeight.quantize(weight(shape), kind=kind, double=False)
        case "nf4 double":
            return FourBitWeight.quantize(weight(shape), block=32)
    return ScaledWeight.quantize(weight(shape), (FORMATS | OF_FILES)[kind])


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 double", *FORMATS, *OF_FILES])
@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_hold_the_numbers_of_the_whole(kind: str, shape: tuple[int, int]) -> None:
    whole = packed(kind, shape)
    outputs, inputs = shape
    boxes = [(slice(0, outputs), slice(inputs * r // 3, inputs * (r + 1) // 3)) for r in range(3)]
    boxes += [(slice(outputs * r // 2, outputs * (r + 1) // 2), slice(0, inputs)) for r in range(2)]
    boxes += [(slice(1, 4), slice(5, 20)), (slice(0, outputs), slice(0, inputs))]
    for dtype in (torch.float32, torch.bfloat16):
        dense = whole.dense(dtype)
        for rows, columns in boxes:
            part = whole.shard(rows, columns)
            assert part.shape == dense[rows, columns].shape
            assert torch.equal(part.dense(dtype), dense[rows, columns])
            assert part.dtype == whole.dtype


def test_boxes_that_lie_on_blocks_stay_as_small() -> None:
    whole = FourBitWeight.quantize(weight((512, 128)), block=64)
    upper = whole.shard(slice(0, 256), slice(0, 128))
    assert upper.block == 64 and upper.nested_absmax is not None
    assert 2 * upper.stored_bytes() - whole.stored_bytes() <= 8
    half = whole.shard(slice(0, 512), slice(64, 128))
    assert half.block == 64 and half.absmax.dtype == torch.float32
    narrow = whole.shard(slice(0, 512), slice(96, 128))  # between two blocks
    assert narrow.block == 32 and narrow.block in BLOCKS


def test_a_box_of_another_place_differs() -> None:
    whole = packed("nf4", (8, 256))
    assert not torch.equal(whole.shard(slice(0, 4), slice(0, 256)).dense(), whole.dense()[4:])


def test_products_of_boxes_add_up() -> None:
    whole, x = packed("int4", (12, 96)), torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    parts = [slice(0, 40), slice(40, 96)]
    total = sum(whole.shard(slice(0, 12), part).product(x[:, part]) for part in parts)
    torch.testing.assert_close(total, whole.product(x))
