"""The planned memory of a run's steps in words, with changes where it is more than there is. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from danlu.core.errors import DanluError, ModelError, RecipeError
from danlu.planning.plan_values import fits, taken_bytes
from danlu.planning.step_plan import RankMemory
from danlu.recipe import Recipe, resolved_yaml
from danlu.recipe.loading import load_tree
from danlu.recipe.yaml_reader import parse
from danlu.recipe.yaml_tree import Problem
from danlu.run.plan_changes import Load, lighter_plans
from danlu.run.planned_step import PlannedStep, planned_step, target_here
from danlu.training.units import format_bytes

_MOST_CHANGES = 4


def memory_parts(memory: RankMemory) -> dict[str, int]:
    """Returns the bytes on the device of a process by part, without parts that it does not have."""
    parts = {**vars(memory.parts), "cache": memory.kv_cache, "copies": memory.engine_copies}
    parts["communication"] = memory.communication
    return {name: count for name, count in parts.items() if count}


def expected_lines(planned: PlannedStep, load: Load | None = None) -> Iterator[str]:
    """Yields the parts of the memory of the process that needs most, or of each device of a device map; and where that
    is more than there is, what to change.

    load: as `lighter_plans` has it; by default the planned recipe is changed.
    """
    plan, recipe = planned.plan, planned.workload.recipe
    stages = plan.stages if plan.worst.memory.device else (plan.worst,)
    for stage in stages:
        memory, where = stage.memory, _where(planned, stage.memory)
        parts = " + ".join(f"{name} {format_bytes(count)}" for name, count in memory_parts(memory).items())
        yield (
            f"memory expected{where}: {parts} = {format_bytes(memory.allocated)} in tensors, for micro-batches of "
            f"{plan.micro} x {recipe.data.max_length} tokens"
        )
        if memory.host.step:
            yield f"memory expected{where}: {format_bytes(memory.host.step)} more wait where memory.offload says"
    if fits(plan, planned.target) is False:
        for stage in stages:
            taken, room = taken_bytes(stage.memory), planned.target.room_bytes(stage.memory.device)
            if taken > room:
                more = f"{format_bytes(taken)}{_where(planned, stage.memory)} are more than the {format_bytes(room)}"
                yield f"memory: {more} that are free. {advice(planned, load)}"


def memory_lines(recipe: Recipe) -> Iterator[str]:
    """Yields lines on the memory of a recipe's run on this machine, for `danlu preview`: nothing is loaded but configs.

    Raises RecipeError for a recipe that no run could begin with.
    """
    try:
        planned = planned_step(recipe, target_here(recipe, measured=False))
    except ModelError as error:
        yield f"memory: unknown, for the model cannot be read: {error}"
        return
    yield from expected_lines(planned)
    if recipe.parallel.shard != "none" and recipe.parallel.data == "auto":
        count = planned.plan.layout.data
        taken = "one is taken" if count == 1 else f"{count} are taken"
        yield f"memory: parallel.data tells here how many processes share the model; {taken}"


def advice(planned: PlannedStep, load: Load | None = None) -> str:
    """A sentence with single changes of the recipe that make a step fit, each as one gives it behind the recipe, with
    the bytes that it then takes; where none does, or where the plan says that it fits as it is, those that save most.
    """
    changes = lighter_plans(planned, load or (lambda change: with_change(planned.workload.recipe, change)))
    fitting = [change for change in changes if change["fits"]]
    if fits(planned.plan, planned.target) is False and fitting:
        return f"Each of these alone makes it fit: {_listed(fitting)}"
    if not changes:
        return "Nothing that was tried saves memory: take a larger machine, or more processes that share the model"
    saving = sorted(changes, key=lambda change: (bool(change["note"]), change["taken"]))
    alone = "No single change makes it fit. " if fits(planned.plan, planned.target) is False else ""
    return f"{alone}These save most, each alone: {_listed(saving)}"


def with_change(recipe: Recipe, change: str) -> Recipe:
    """Returns a recipe with one `key=value`. Raises RecipeError where the change goes with nothing else."""
    problems: list[Problem] = []
    return load_tree(parse(resolved_yaml(recipe), "recipe", problems), "recipe", [change], problems).recipe


def why_unplanned(error: Exception) -> str:
    """Says in words why a run has no plan."""
    if isinstance(error, RecipeError):
        return "; ".join(error.problems)
    return str(error) if isinstance(error, DanluError | OSError) else f"{type(error).__name__}: {error}"


def _listed(changes: list[dict[str, Any]]) -> str:
    """The first changes that leave the result of training as it is, and one more that trains something else."""
    same = [change for change in changes if not change["note"]][: _MOST_CHANGES - 1]
    other = [change for change in changes if change["note"]][: _MOST_CHANGES - len(same)]
    return ", ".join(
        f"{change['change']} ({format_bytes(change['taken'])}{'; ' if change['note'] else ''}{change['note']})"
        for change in (*same, *other)
    )


def _where(planned: PlannedStep, memory: RankMemory) -> str:
    plan = planned.plan
    if memory.device:
        return f" on {memory.device}"
    if len(plan.stages) > 1:
        return f" in each process of pipeline stage {plan.stages.index(plan.worst)}"
    return " in each process" if plan.layout.world > 1 else ""
