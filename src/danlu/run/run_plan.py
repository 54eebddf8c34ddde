"""The plan.json of a run: what its steps are expected to take when they begin, and what they took in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from danlu.assembly.memory_estimate import processes_here
from danlu.core.atomic_write import write_atomically
from danlu.core.errors import DanluError
from danlu.core.run_files import PLAN
from danlu.core.types import MemoryParts
from danlu.recipe import Recipe


def write_plan(folder: Path, recipe: Recipe, *, world: int, micro: int, log: Callable[[str], None]) -> None:
    """Plans the steps of a run on this machine, and writes the plan into its folder.

    A run needs no plan, so whatever keeps it from having one is a line for the console, and a plan of earlier steps is
    removed. world: processes. micro: packed sequences of a micro-batch.
    """
    if recipe.stage == "classify":
        return
    (folder / PLAN).unlink(missing_ok=True)
    try:
        # Here, not above: a dry run and the processes but the first load none of this.
        from danlu.run.planned_step import planned_step, target_here

        own = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro": micro})})
        values = planned_step(own, target_here(own, world, world // processes_here(world))).values
        write_atomically(folder / PLAN, f"{json.dumps(values, indent=2, allow_nan=False)}\n".encode())
    except Exception as error:  # whatever it is: a run must not end for its plan
        is_expected = isinstance(error, DanluError | OSError)
        log(f"no plan of the steps ({PLAN}): {error if is_expected else f'{type(error).__name__}: {error}'}")


def plan_in_summary(folder: Path, memory: MemoryParts | None) -> Mapping[str, Any] | None:
    """The plan of a run next to what it took, for its summary; None where it has none.

    memory: as it was counted in training.
    """
    from danlu.report.plan_comparison import plan_of_record, read_plan
    from danlu.report.run_record import read_record

    try:
        plan = read_plan(folder)
    except DanluError:  # torn; `danlu plan RUN` says so
        return None
    if plan is None:
        return None
    summary = {} if memory is None else {"memory": vars(memory)}
    return plan_of_record(plan, replace(read_record(folder), summary=summary))
