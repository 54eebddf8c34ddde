"""Single changes of a recipe, each with its own plan: those that save memory, and neighbouring layouts. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from danlu.core.errors import DanluError
from danlu.planning.lengths import FULL_PACKS
from danlu.planning.plan_values import fits, taken_bytes
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
    for change in _changes(planned):
        other = _changed(planned, load, change.override)
        if other is None:
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
                    "fits": fits(other.plan, planned.target) is not False,
                }
            )
    return sorted(lighter, key=_order)


def neighbouring_layouts(planned: PlannedStep, load: Load) -> list[dict[str, Any]]:
    """Returns the layouts that differ in one degree, doubled or halved, or in the sharding: `change`, `taken` bytes,
    `seconds`, and of these what is `exposed` communication and `bubble`. Fastest first.
    """
    section = planned.workload.recipe.parallel
    degrees = {
        "parallel.tensor": section.tensor,
        "parallel.context": section.context.size,
        "parallel.expert": section.expert,
        "parallel.pipeline" if section.pipeline.stages == 1 else "parallel.pipeline.stages": section.pipeline.stages,
        "parallel.replicate": section.replicate,
    }
    changes = [f"{key}={other}" for key, degree in degrees.items() for other in (2 * degree, degree // 2) if other]
    changes += [f"parallel.shard={kind}" for kind in ("none", "zero1", "zero2", "zero3") if kind != section.shard]
    layouts = []
    for change in changes:
        other = _changed(planned, load, change)
        if other is not None:
            seconds = other.plan.seconds
            layouts.append(
                {
                    "change": change,
                    "taken": taken_bytes(other.plan.worst.memory),
                    "seconds": None if seconds is None else seconds.total,
                    "exposed": None if seconds is None else seconds.exposed,
                    "bubble": None if seconds is None else seconds.bubble,
                }
            )
    return sorted(layouts, key=lambda layout: (layout["seconds"] or 0, layout["taken"]))


def _changed(planned: PlannedStep, load: Load, change: str) -> PlannedStep | None:
    """The plan with a change; None where the recipe or the model cannot have it."""
    before = planned.workload
    try:
        recipe = load(change)
        is_shorter = recipe.data.max_length != before.recipe.data.max_length
        lengths = FULL_PACKS if is_shorter else before.lengths
        return planned_step(recipe, planned.target, lengths, before.rollout_lengths)
    except DanluError:
        return None


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
    if recipe.activations == "fp32":
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
