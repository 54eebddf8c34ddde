"""The micro-batch that fits, from bytes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from danlu.planning.activation_memory import ActivationBytes, StepMemory


def step(kept: int = 100, recomputed: int = 0) -> StepMemory:
    return StepMemory(1000, ActivationBytes(kept, recomputed), loss_workspace=30, max_loss_workspace=50)


@pytest.mark.parametrize(
    ("memory", "available", "at_most", "fits"),
    [
        (step(), 1050 + 350, 8, 3),
        (step(), 1050 + 399, 8, 3),
        (step(), 1050 + 400, 8, 4),
        (step(), 10**6, 8, 8),
        (step(), 0, 8, 1),  # never empty
        (step(recomputed=40), 1050 + 300, 8, 2),  # layers that recompute take more than the loss: 2 x 140
        (step(recomputed=10), 1050 + 300, 8, 3),  # 3 x 110 is less than 300 and the loss's 50
    ],
)
def test_micro_batches_fill_what_is_available(memory: StepMemory, available: float, at_most: int, fits: int) -> None:
    assert memory.largest_micro_batch(available, at_most) == fits


def test_a_share_of_what_the_fixed_part_leaves() -> None:
    assert step().largest_micro_batch(1050 + 500, 8, share=0.8) == 4
    assert step().largest_micro_batch(1050 + 500, 8) == 5  # control


def test_the_loss_and_a_layer_that_recomputes_are_not_there_together() -> None:
    assert step().of_smallest == 1000 + 100 + 30
    assert step(recomputed=20).of_smallest == 1000 + 100 + 30
    assert step(recomputed=40).of_smallest == 1000 + 100 + 40


def test_the_smallest_micro_batch_may_be_of_two_sequences() -> None:
    """A row with two answers goes through the model as a whole."""
    pairs = replace(step(recomputed=40), smallest=2)
    assert pairs.of_smallest == 1000 + 200 + 80
    assert replace(step(), smallest=2).of_smallest == 1000 + 200 + 50  # the loss's slices: at most 50
    assert step(recomputed=40).of_smallest == 1000 + 140  # control
