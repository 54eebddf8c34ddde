"""Boxes against the obvious way: arrays of marks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from danlu.core.shard_box import ShardBox, find_gap, find_overlap


def random_box(draw: random.Random, shape: tuple[int, ...]) -> ShardBox:
    offsets = tuple(draw.randint(0, length) for length in shape)
    sizes = tuple(draw.randint(0, length - offset) for offset, length in zip(offsets, shape, strict=True))
    return ShardBox(shape, offsets, sizes)


def marked(shape: tuple[int, ...], *boxes: ShardBox) -> np.ndarray:
    """How many of the boxes hold each element."""
    marks = np.zeros(shape, int)
    for box in boxes:
        marks[box.slices] += 1
    return marks


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 2, 4), (2, 0, 3)])
def test_against_marks(shape: tuple[int, ...]) -> None:
    draw = random.Random(1)
    for _ in range(200):
        box, other = random_box(draw, shape), random_box(draw, shape)
        common = box.intersection(other)
        both = marked(shape, box, other) == 2
        assert both.sum() == (0 if common is None else common.numel)
        assert common is None or (marked(shape, common) == 1)[both].all()
        rest = list(box.difference(other))
        assert (marked(shape, *rest) == (marked(shape, box) - both)).all()
        order = np.arange(int(np.prod(shape))).reshape(shape)
        found = [at for offset, count in box.contiguous_ranges() for at in range(offset, offset + count)]
        assert found == order[box.slices].flatten().tolist()
        if common is not None:
            assert (order[box.slices][common.relative_to(box).slices] == order[common.slices]).all()


def test_contiguous_ranges_are_as_long_as_they_can_be() -> None:
    assert list(ShardBox((6, 4), (2, 0), (3, 4)).contiguous_ranges()) == [(8, 12)]
    assert list(ShardBox((6, 4), (2, 1), (2, 2)).contiguous_ranges()) == [(9, 2), (13, 2)]
    assert list(ShardBox((2, 3, 4), (0, 1, 0), (2, 2, 4)).contiguous_ranges()) == [(4, 8), (16, 8)]
    assert list(ShardBox((), (), ()).contiguous_ranges()) == [(0, 1)]


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 2, 4)])
def test_overlaps_and_gaps(shape: tuple[int, ...]) -> None:
    draw = random.Random(2)
    seen = set()
    for _ in range(300):
        boxes = [random_box(draw, shape) for _ in range(draw.randint(0, 4))]
        marks = marked(shape, *boxes)
        common = find_overlap(boxes)
        assert (common is None) == (marks <= 1).all()
        assert common is None or (marks[common.slices] > 1).all()
        if common is None:
            hole = find_gap(shape, boxes)
            assert (hole is None) == marks.all()
            assert hole is None or (hole.numel > 0 and not marks[hole.slices].any())
            seen.add(hole is None)
        seen.add(f"overlap {common is None}")
    assert seen >= {False, "overlap True"} | ({"overlap False"} if shape else set())


def test_tiles_have_neither() -> None:
    tiles = [ShardBox((4, 9), (row, column), (2, 3)) for row in (0, 2) for column in (0, 3, 6)]
    assert find_overlap(tiles) is None
    assert find_gap((4, 9), tiles) is None
    assert str(find_gap((4, 9), tiles[:4] + tiles[5:])) == "[2:4, 3:6]"
    assert str(find_overlap([*tiles, ShardBox((4, 9), (1, 2), (1, 1))])) == "[1:2, 2:3]"
    assert find_gap((0, 4), []) is None
