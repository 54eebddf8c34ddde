"""Boxes of optimizer state, from the boxes of parameters."""

from __future__ import annotations

import pytest
import torch
from builders.checkpoint_worker import LAYOUTS, rows

from danlu.core.shard_box import ShardBox
from danlu.training.checkpoints.state_boxes import state_box


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "same"])
@pytest.mark.parametrize("shape", [(7, 12), (3, 5), (9,), (4, 3, 6), ()])
def test_a_number_for_all_is_written_by_one(layout: str, shape: tuple[int, ...]) -> None:
    place = LAYOUTS[layout]
    assert place is not None
    parameters = [place(shape, rank, 4) for rank in range(4)]
    steps = [state_box(torch.tensor(1.0), parameter) for parameter in parameters]
    assert sum(step.is_writer for step in steps) == 1
    assert {(step.global_shape, step.offsets, step.sizes) for step in steps} == {((), (), ())}


def test_what_has_the_shape_of_the_box_is_that_box() -> None:
    parameter = rows((7, 12), 1, 4)
    assert state_box(torch.zeros(2, 12), parameter) is parameter


def test_of_a_whole_parameter_any_state_is_whole() -> None:
    parameter = ShardBox.full((8, 512), replicas=4, is_writer=False)
    assert state_box(torch.zeros(8, 1), parameter) == ShardBox((8, 1), (0, 0), (8, 1), 4, False)


def test_what_has_another_shape_stays_with_its_box() -> None:
    parameter = rows((7, 12), 1, 4)
    assert state_box(torch.zeros(2, 1), parameter) is parameter  # Adafactor's rows
