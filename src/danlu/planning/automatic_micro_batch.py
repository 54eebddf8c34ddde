"""`batch.micro: auto`: the most packed sequences of a micro-batch with a step that fits. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from danlu.core.errors import RecipeError
from danlu.parallel.layout import Layout
from danlu.planning.step_estimate import longest_paths
from danlu.planning.target import Target
from danlu.planning.workload import Workload

if TYPE_CHECKING:
    from danlu.planning.step import StageBytes

MAX_CPU_TOKENS = 4096
"""More tokens at once make CPU steps no faster (measured from 1024 to 8192), only larger."""
MARGIN = 0.2
"""The share that stays free of the memory which a step's fixed bytes leave. `batch.memory` is used without it."""
_GIB = 2**30

StageMemory = Callable[[int], "Sequence[StageBytes]"]
"""Packed sequences of a micro-batch -> the memory of each stage."""


def automatic_micro_batch(
    workload: Workload, layout: Layout, target: Target, per_step: int, memory: StageMemory
) -> int:
    """Returns the most packed sequences of a micro-batch that fit on every stage; at least the smallest one.

    per_step: packed sequences of a step on a data rank. Raises RecipeError where `batch.memory` does not hold the
    smallest one, with the recomputation that it would hold.
    """
    recipe = workload.recipe
    length, section = recipe.data.max_length, recipe.parallel.pipeline
    at_most = per_step
    if section.stages > 1 and not section.updates_each_micro_batch:
        # Through stages go two micro-batches for each of them or more: with fewer, most of the time would be a bubble.
        at_most = max(1, per_step // (2 * section.stages))
    if target.device_type == "cpu":
        at_most = min(at_most, max(1, MAX_CPU_TOKENS // length))
    if recipe.batch.memory is not None:
        room = recipe.batch.memory * _GIB
        if max(each.peak for each in memory(1)) > room:
            raise RecipeError(_does_not_hold(workload, layout, target, memory))
        return _largest(at_most, lambda micro: all(each.peak <= room for each in memory(micro)))
    return _largest(at_most, lambda micro: all(map(_fits_with_margin, memory(micro))))


def _fits_with_margin(stage: StageBytes) -> bool:
    return not stage.room or stage.peak - stage.fixed <= (1 - MARGIN) * (stage.room - stage.fixed)


def _largest(at_most: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, of those up to at_most; 1 where none does."""
    low, high = 1, at_most
    while low < high:
        middle = -(-(low + high) // 2)
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _does_not_hold(workload: Workload, layout: Layout, target: Target, memory: StageMemory) -> str:
    """The message for a `batch.memory` that does not hold the smallest micro-batch."""
    from danlu.planning.step import stage_memory

    recipe = workload.recipe
    worst = max(memory(1), key=lambda stage: stage.peak)
    need, budget, smallest = worst.peak, recipe.batch.memory or 0, longest_paths(recipe)
    of_device = f" of {worst.device}" if worst.device else ""
    sequences = "one packed sequence" if smallest == 1 else f"one row of {smallest} sequences"
    remedy = "Give more, or lower data.max_length."
    for kind in ("selective", "full"):
        section = recipe.memory.recompute.model_copy(update={"kind": kind, "budget": None})
        changed = recipe.model_copy(update={"memory": recipe.memory.model_copy(update={"recompute": section})})
        own = max(each.peak for each in stage_memory(replace(workload, recipe=changed), layout, target, 1))
        if own <= budget * _GIB and own < need:
            remedy = f"With memory.recompute={kind} they need about {own / _GIB:.2f} GiB; or give more."
            break
    return (
        f"batch.memory: {budget} GiB{of_device} do not hold {sequences}: weights, gradients, optimizer and one of "
        f"{smallest * recipe.data.max_length} tokens need about {need / _GIB:.2f} GiB. {remedy}"
    )
