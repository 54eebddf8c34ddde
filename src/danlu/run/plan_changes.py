"""Single changes of a recipe with which a step takes less memory, each with a plan of its own. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from danlu.core.errors import DanluError
from danlu.planning.lengths import FULL_PACKS
from danlu.planning.plan_values import taken_bytes
from danlu.recipe import Recipe
from danlu.run.planned_step import PlannedStep, planned_step

Load = Callable[[str], Recipe]
"""Loads the recipe with one more `key=value`. Raises DanluError where the change goes with nothing else."""


class _Change(NamedTuple):
    override: str
    note: str


def lighter_plans(planned: PlannedStep, load: Load) -> list[dict[str, Any]]:
    """Returns the single changes with which a step takes less memory: `change`, `taken` bytes, `seconds`, `note`, and
    whether it `fits`.

    Those with which it fits come first, of these those that leave the result as it is, and the fastest. Of the others
    those that take least come first.
    """
    lighter = []
    before = taken_bytes(planned.plan.worst.memory)
    room = planned.target.cluster.card.memory_bytes
    for change in _changes(planned):
        try:
            recipe = load(change.override)
            lengths = planned.workload.lengths
            shorter = recipe.data.max_length != planned.workload.recipe.data.max_length
            other = planned_step(
                recipe, planned.target, FULL_PACKS if shorter else lengths, planned.workload.rollout_lengths
            )
        except DanluError:  # a change that this recipe cannot have
            continue
        taken = taken_bytes(other.plan.worst.memory)
        if taken < before:
            seconds = None if other.plan.seconds is None else other.plan.seconds.total
            lighter.append(
                {
                    "change": change.override,
                    "taken": taken,
                    "seconds": seconds,
                    "note": change.note,
                    "fits": taken <= room,
                }
            )
    return sorted(lighter, key=_order)


def _order(change: Mapping[str, Any]) -> tuple[float, ...]:
    if change["fits"]:
        return 0, bool(change["note"]), change["seconds"] or 0, change["taken"]
    return 1, change["taken"]


def _changes(planned: PlannedStep) -> Iterator[_Change]:
    recipe, plan, layout = planned.workload.recipe, planned.plan, planned.plan.layout
    for micro in (plan.micro // 2, 1):
        if 0 < micro < plan.micro:
            yield _Change(f"batch.micro={micro}", "")
    for kind in ("elementwise", "selective", "full", "every"):
        if kind != recipe.memory.recompute.kind:
            yield _Change(f"memory.recompute={kind}", "")
    if planned.target.device_type != "cpu":
        for part in ("activations", "optimizer", "parameters"):
            if part not in recipe.memory.offload:
                yield _Change(f"memory.offload=[{', '.join([*recipe.memory.offload, part])}]", "")
    yield from _layouts(layout.data * layout.context * layout.tensor, recipe)
    for optimizer in ("adamw8bit", "adafactor", "lion"):
        if optimizer != recipe.optimizer.kind:
            yield _Change(f"optimizer={optimizer}", "another optimizer")
    if recipe.precision == "fp32":
        yield _Change("precision=bf16", "products in bf16")
    if recipe.adapter is None and recipe.model.path is not None:
        yield _Change("adapter=lora", "few weights are trained")
    if recipe.adapter is not None and recipe.quantization is None:
        yield _Change("quantization=nf4", "the base in 4 bits")
    if recipe.stage != "rl":
        yield _Change(f"data.max_length={max(1, recipe.data.max_length // 2)}", "shorter documents")


def _layouts(ranks: int, recipe: Recipe) -> Iterator[_Change]:
    section = recipe.parallel
    if ranks > 1 and section.shard == "none":
        yield _Change("parallel.shard=zero3", "")
    degree = 2
    while degree <= min(ranks, 16):
        if degree > section.tensor:
            yield _Change(f"parallel.tensor={degree}", "")
        if degree > section.context.size:
            yield _Change(f"parallel.context={degree}", "")
        degree *= 2
