"""Reports of a run's memory: the planned memory of its steps, and its parts when it ran out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from danlu.core.errors import ResourceError
from danlu.recipe import Recipe
from danlu.run.run_plan import RunPlan
from danlu.stages.protocols import StepBudget
from danlu.training.memory_parts import resident_bytes
from danlu.training.metrics import peak_memory_bytes
from danlu.training.out_of_memory import is_out_of_memory, out_of_memory_message
from danlu.training.state import Run
from danlu.training.units import format_bytes

if TYPE_CHECKING:
    from danlu.run.planned_step import PlannedStep


class MemoryReport:
    """A context in which an allocator's error becomes a ResourceError: with the parts of the memory, and single changes
    that save some.

    Enter it before the model is placed, and call `began` as soon as there is a run.
    """

    def __init__(self, recipe: Recipe, device: torch.device, plan: RunPlan) -> None:
        self.recipe, self.device, self.plan = recipe, device, plan
        self._run: Run | None = None
        self._budget: StepBudget | None = None

    def began(self, run: Run, budget: StepBudget) -> None:
        """Sets the run: from here on the parts of a step's memory are known."""
        self._run, self._budget = run, budget

    def expected(self) -> Sequence[str]:
        """Lines for the console on the planned memory of a step, with changes where that is more than there is; none
        where a step cannot be planned, which `RunPlan.write` explains.
        """
        planned = self.plan.planned(self._micro)
        if planned is None:
            return ()
        from danlu.run.expected_memory import expected_lines

        return tuple(expected_lines(planned))

    @property
    def _micro(self) -> int | None:
        return None if self._run is None else self._run.learner.micro

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_out_of_memory(error):
            raise ResourceError(self._message(error)) from error

    def _message(self, error: BaseException) -> str:
        planned = self.plan.planned(self._micro)
        run, lines = self._run, [f"{out_of_memory_message(error)}. {self._room(planned)}"]
        lines += self._parts(planned)
        if planned is not None:
            from danlu.run.expected_memory import advice

            lines.append(advice(planned))
        elif self.plan.problem is not None:
            lines.append(f"what would save memory is not known, as a step cannot be planned: {self.plan.problem}")
        latest = None if run is None else run.store.latest()
        if latest is None:
            lines.append("nothing was saved yet")
        else:
            lines.append(
                f"the state of step {latest.step} is saved; the same command, with the change, goes on from there"
            )
        return "\n  ".join(lines)

    def _parts(self, planned: PlannedStep | None) -> list[str]:
        """A line of the parts as they were counted, once there was a step; else as they are planned."""
        run, budget = self._run, self._budget
        counted = None if run is None else run.learner.activations
        if run is not None and budget is not None and counted is not None and counted.peak_bytes:
            parts = {name: count for name, count in vars(budget.memory(run)).items() if count}
        elif planned is not None:
            from danlu.run.expected_memory import memory_parts

            parts = memory_parts(planned.plan.worst.memory)
        else:
            return []
        listed = " + ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
        return [f"a step takes {listed} = {format_bytes(sum(parts.values()))} in tensors"]

    def _room(self, planned: PlannedStep | None) -> str:
        """The memory that is taken and free now, as far as the system tells; on each of several devices."""
        names = [] if planned is None else [stage.memory.device for stage in planned.plan.stages]
        devices = [torch.device(name) for name in names if name] or [self.device]
        return ". ".join(dict.fromkeys(map(_room_on, devices)))


def _room_on(device: torch.device) -> str:
    if device.type != "cuda":
        resident, peak = format_bytes(resident_bytes(device)), format_bytes(peak_memory_bytes(device))
        return f"This process holds {resident}, and held {peak} at most"
    free, whole = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    of_others = max(0, whole - free - ours)
    number = "" if device.index is None else f" (cuda:{device.index})"
    return (
        f"Of {format_bytes(whole)} on {torch.cuda.get_device_name(device)}{number} this process has "
        f"{format_bytes(ours)} (at most {format_bytes(torch.cuda.max_memory_allocated(device))} in tensors), other "
        f"programs and CUDA itself {format_bytes(of_others)}"
    )
