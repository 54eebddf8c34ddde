"""Reports of a run's memory: the expected memory of its steps, and its parts when it ran out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from danlu.assembly.memory_estimate import MemoryEstimate, expected_lines
from danlu.core.errors import ResourceError
from danlu.core.types import MemoryParts
from danlu.recipe import Recipe
from danlu.stages.protocols import StepBudget
from danlu.training.memory_parts import resident_bytes
from danlu.training.metrics import peak_memory_bytes
from danlu.training.out_of_memory import is_out_of_memory, out_of_memory_message
from danlu.training.state import Run
from danlu.training.units import format_bytes


class MemoryReport:
    """A context in which an allocator's error becomes a ResourceError: with the parts of the memory, and advice.

    Enter it before the model is placed, and call `began` as soon as there is a run.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self._run: Run | None = None
        self._budget: StepBudget | None = None
        self._estimate: MemoryEstimate | None = None

    def began(self, run: Run, budget: StepBudget) -> None:
        """Sets the run: from here on the parts of a step's memory are known."""
        self._run, self._budget, self._estimate = run, budget, budget.expected(run)

    def expected(self) -> Sequence[str]:
        """Lines for the console on the expected memory of a step; with advice where that is more than there is."""
        return () if self._estimate is None else expected_lines(self._estimate, is_placed=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_out_of_memory(error):
            raise ResourceError(self._message(error)) from error

    def _message(self, error: BaseException) -> str:
        from danlu.planning.memory_advice import advice

        run, lines = self._run, [f"{out_of_memory_message(error)}. {self._room()}"]
        if (parts := self._parts()) is not None:
            named = " + ".join(f"{name} {format_bytes(value)}" for name, value in vars(parts).items() if value)
            lines.append(f"a step takes {named} = {format_bytes(parts.total)} in tensors")
        micro = 1 if run is None else run.learner.micro
        known = {} if parts is None else vars(parts)
        lines.append(advice(self.recipe, known, device_type=self.device.type, micro=micro))
        latest = None if run is None else run.store.latest()
        if latest is None:
            lines.append("nothing was saved yet")
        else:
            lines.append(
                f"the state of step {latest.step} is saved; the same command, with the change, goes on from there"
            )
        return "\n  ".join(lines)

    def _parts(self) -> MemoryParts | None:
        """The parts as they were measured, once there was a step; else as they are expected."""
        run, budget = self._run, self._budget
        counted = None if run is None else run.learner.activations
        if run is not None and budget is not None and counted is not None and counted.peak_bytes:
            return budget.memory(run)
        return None if self._estimate is None else self._estimate.parts

    def _room(self) -> str:
        """The memory that is taken and free now, as far as the system tells; on each of several devices."""
        several = () if self._estimate is None else self._estimate.by_device
        devices = [torch.device(own.device) for own in several] or [self.device]
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
