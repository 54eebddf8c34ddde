"""Boxes against the obvious way: arrays of marks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from danlu.train.checkpoints.boxes import Box, gap, overlap, runs


def some(draw: random.Random, shape: tuple[int, ...]) -> Box:
    start = tuple(draw.randint(0, length) for length in shape)
    return Box(start, tuple(draw.randint(0, length - begin) for begin, length in zip(start, shape, strict=True)))


def marked(shape: tuple[int, ...], *boxes: Box) -> np.ndarray:
    """How many of the boxes hold each element."""
    marks = np.zeros(shape, int)
    for box in boxes:
        marks[box.slices] += 1
    return marks


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 2, 4), (2, 0, 3)])
def test_against_marks(shape: tuple[int, ...]) -> None:
    draw = random.Random(1)
    for _ in range(200):
        one, other = some(draw, shape), some(draw, shape)
        common = one.common(other)
        both = marked(shape, one, other) == 2
        assert both.sum() == (0 if common is None else common.count)
        assert common is None or (marked(shape, common) == 1)[both].all()
        rest = list(one.without(other))
        assert (marked(shape, *rest) == (marked(shape, one) - both)).all()
        order = np.arange(int(np.prod(shape))).reshape(shape)
        found = [at for offset, count in runs(shape, one) for at in range(offset, offset + count)]
        assert found == order[one.slices].flatten().tolist()
        if common is not None:
            assert (order[one.slices][common.seen_from(one).slices] == order[common.slices]).all()


def test_runs_are_as_long_as_they_can_be() -> None:
    assert list(runs((6, 4), Box((2, 0), (3, 4)))) == [(8, 12)]
    assert list(runs((6, 4), Box((2, 1), (2, 2)))) == [(9, 2), (13, 2)]
    assert list(runs((2, 3, 4), Box((0, 1, 0), (2, 2, 4)))) == [(4, 8), (16, 8)]
    assert list(runs((), Box((), ()))) == [(0, 1)]


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 2, 4)])
def test_overlaps_and_gaps(shape: tuple[int, ...]) -> None:
    draw = random.Random(2)
    seen = set()
    for _ in range(300):
        boxes = [some(draw, shape) for _ in range(draw.randint(0, 4))]
        marks = marked(shape, *boxes)
        twice = overlap(boxes)
        assert (twice is None) == (marks <= 1).all()
        assert twice is None or (marks[twice.slices] > 1).all()
        if twice is None:
            hole = gap(shape, boxes)
            assert (hole is None) == marks.all()
            assert hole is None or (hole.count > 0 and not marks[hole.slices].any())
            seen.add(hole is None)
        seen.add(f"overlap {twice is None}")
    assert seen >= {False, "overlap True"} | ({"overlap False"} if shape else set())


def test_tiles_have_neither() -> None:
    tiles = [Box((row, column), (2, 3)) for row in (0, 2) for column in (0, 3, 6)]
    assert overlap(tiles) is None
    assert gap((4, 9), tiles) is None
    assert str(gap((4, 9), tiles[:4] + tiles[5:])) == "[2:4, 3:6]"
    assert str(overlap([*tiles, Box((1, 2), (1, 1))])) == "[1:2, 2:3]"
    assert gap((0, 4), []) is None
