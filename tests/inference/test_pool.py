"""Blocks of the pool: what is moved, copied and cleared, what memory they take."""

from __future__ import annotations

import math

import pytest
import torch

from danlu.core.layer_types import LayerCache
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan
from danlu.planning.cache_memory import block_bytes

CPU = torch.device("cpu")
LAYERS = [LayerCache(((2, 8), (2, 8)), None), LayerCache(((2, 8), (2, 8)), 5), LayerCache(((16,), (4,)), None)]
"""Of two kinds: keys and values by head, and a latent of 16 beside a rotated key of 4 that all heads share."""


def pool(blocks=6, host_blocks=0, dtype=torch.float32):
    made = CachePool(LAYERS, blocks=blocks, block=4, dtype=dtype, device=CPU, host_blocks=host_blocks)
    for layer in range(len(LAYERS)):
        for number, kind in enumerate(made.tensors(layer)):
            kind.copy_(layer * 100 + number * 10 + torch.arange(blocks).view(-1, *[1] * (kind.dim() - 1)))
    return made


def contents(made):
    """The number that is in each block of each tensor; NaN where it is not one number."""
    kinds = [kind for layer in range(len(LAYERS)) for kind in made.tensors(layer)]
    rows = [[b.flatten()[0].item() if (b == b.flatten()[0]).all() else math.nan for b in kind] for kind in kinds]
    return torch.tensor(rows)


def test_blocks_are_stored_head_by_head():
    made = pool()
    assert [tuple(kind.shape) for kind in made.tensors(1)] == [(6, 2, 4, 8)] * 2
    assert [tuple(kind.shape) for kind in made.tensors(2)] == [(6, 4, 16), (6, 4, 4)]
    assert block_bytes(LAYERS, 4, 4) == sum(kind[0].nbytes for layer in range(3) for kind in made.tensors(layer))
    assert block_bytes(LAYERS, 4, 2) * 2 == block_bytes(LAYERS, 4, 4)


def test_copies_and_fresh_blocks():
    made = pool()
    before = contents(made)
    made.tensors(0)[0][2] = math.nan
    made.carry_out(Plan(copies=((0, 3), (1, 4)), fresh=(2, 5)))
    want = before.clone()
    want[:, 3], want[:, 4], want[:, [2, 5]] = before[:, 0], before[:, 1], 0
    assert torch.equal(contents(made), want)


def test_a_block_comes_back_from_the_host():
    made = pool(host_blocks=2)
    before = contents(made)
    made.carry_out(Plan(swapped_out=((1, 0), (4, 1)), fresh=(1, 4)))
    assert (contents(made)[:, [1, 4]] == 0).all()
    made.carry_out(Plan(swapped_in=((0, 5), (1, 1))))
    after = contents(made)
    assert torch.equal(after[:, 5], before[:, 1])
    assert torch.equal(after[:, 1], before[:, 4])


def test_a_block_that_is_swapped_out_makes_room_in_the_same_step():
    made = pool(host_blocks=2)
    before = contents(made)
    made.carry_out(Plan(swapped_out=((3, 0),)))
    made.carry_out(Plan(swapped_out=((1, 1),), swapped_in=((0, 1),), copies=((1, 2),)))
    assert torch.equal(contents(made)[:, 1], before[:, 3])
    assert torch.equal(contents(made)[:, 2], before[:, 3])


def test_what_is_written_is_gathered():
    made = pool()
    plan = Plan(chunks=(Chunk(0, 5, 6, (4, 1), 6), Chunk(1, 0, 7, (3, 0), 7)))
    made.carry_out(plan)
    for layer in range(3):
        rows = [torch.randn(8, *shape) for shape in LAYERS[layer].shapes]
        made.write(layer, *rows)
        for written, read in zip(rows, made.gather(layer, torch.tensor([3, 0]), 7), strict=True):
            assert torch.equal(read, written[1:])
        for written, read in zip(rows, made.gather(layer, torch.tensor([4, 1]), 6), strict=True):
            assert torch.equal(read[5], written[0])
            assert not torch.equal(read[4], written[0])


def test_released_memory_is_taken_again_as_zeros():
    made = pool()
    made.release()
    with pytest.raises(IndexError):
        made.tensors(0)
    made.allocate()
    assert (contents(made) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_taken_when_it_is_written(dtype):
    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident_bytes()
    made = CachePool(LAYERS[:1], blocks=1 << 18, block=4, dtype=dtype, device=CPU)
    size = made.tensors(0)[0].nbytes
    assert size >= 32 << 20
    assert resident_bytes() - before < size / 4
    made.tensors(0)[0].fill_(1)
    assert resident_bytes() - before > size * 3 / 4
