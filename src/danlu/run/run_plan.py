"""The plan.json of a run: what its steps are expected to take when they begin, and what they took in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.assembly.machine_memory import free_bytes, gpus_of_torch, kernels_name, processes_here
from danlu.core.atomic_write import write_atomically
from danlu.core.errors import DanluError
from danlu.core.memory_parts import MemoryParts
from danlu.core.run_files import PLAN
from danlu.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from danlu.planning.target import Target
    from danlu.run.planned_step import PlannedStep


class RunPlan:
    """The plan of a run's steps on this machine, made when it is first asked for.

    Memory that is free now counts as what its processes may take, so it is made before models are placed.
    """

    def __init__(self, recipe: Recipe, device: torch.device, world: int) -> None:
        self.recipe, self.device, self.world = recipe, device, world
        self.problem: str | None = None
        """The reason why the run has no plan, once one was asked for."""
        self._free_bytes = free_bytes(device, world)
        self._planned: dict[int | None, PlannedStep | None] = {}

    def micro_batch(self) -> int:
        """The packed sequences of a micro-batch that `batch.micro: auto` stands for.

        Raises RecipeError where `batch.memory` does not hold the smallest one.
        """
        from danlu.run.planned_step import planned_micro_batch

        return planned_micro_batch(self.recipe, self._target(measured=False))

    def planned(self, micro: int | None = None) -> PlannedStep | None:
        """The plan of steps with micro-batches of so many packed sequences, or as many as the recipe says; None where
        the run cannot be planned.

        A run needs no plan, so nothing is raised, whatever it is.
        """
        if self.recipe.stage == "classify":
            return None
        if micro not in self._planned:
            self._planned[micro] = self._plan(micro)
        return self._planned[micro]

    def write(self, folder: Path, micro: int, log: Callable[[str], None]) -> None:
        """Writes the plan into the folder of the run. What keeps it from having one is a line for the console, and a
        plan of earlier steps is removed.
        """
        (folder / PLAN).unlink(missing_ok=True)
        planned, problem = self.planned(micro), self.problem
        if planned is not None:
            try:
                text = json.dumps(planned.values, indent=2, allow_nan=False)
                write_atomically(folder / PLAN, f"{text}\n".encode())
            except (OSError, ValueError) as error:
                problem = str(error)
        if problem is not None:
            log(f"no plan of the steps ({PLAN}): {problem}")

    def _plan(self, micro: int | None) -> PlannedStep | None:
        own = self.recipe
        if micro is not None:
            own = own.model_copy(update={"batch": own.batch.model_copy(update={"micro": micro})})
        try:
            # Here, not above: the processes but the first load none of this.
            from danlu.run.planned_step import planned_step

            return planned_step(own, self._target())
        except Exception as error:  # whatever it is: a run must not end for its plan
            from danlu.run.expected_memory import why_unplanned

            self.problem = why_unplanned(error)
            return None

    def _target(self, *, measured: bool = True) -> Target:
        from danlu.run.planned_step import target_here

        nodes = self.world // processes_here(self.world)
        target = target_here(self.recipe, self.world, nodes, free_bytes=self._free_bytes, measured=measured)
        if self.device.type == "cuda" and target.device_type == "cpu":  # nvidia-smi is not there
            target = replace(target, cluster=gpus_of_torch(self.device, nodes, self.world // nodes), profile=None)
        target = replace(target, own_kernels=kernels_name(self.device.type))
        if self.recipe.parallel.device_map is not None:
            from danlu.assembly.devices import visible_devices

            target = replace(target, devices=visible_devices(self.recipe.device))
        return target


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
