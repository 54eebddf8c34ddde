"""The current step, phase and module of a process's main thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_TRACKED_DEPTH = 3  # components of the names of tracked modules: layers.3.mlp


@dataclass
class PhaseTracker:
    """The current step, phase and module of this process's main thread.

    Written by assignment, which costs nothing; read by another thread.
    """

    step: int | None = None
    phase: str = ""
    module: str = ""

    def begin(self, phase: str, step: int | None = None) -> None:
        """Enters a phase (forward, backward, optimizer, checkpoint ...), of the step before where none is given."""
        self.module = ""
        self.phase = phase
        if step is not None:
            self.step = step

    def __str__(self) -> str:
        """``layers.3.mlp (backward, step 17)``; empty before the first phase."""
        step = "" if self.step is None else f"step {self.step}"
        inside = ", ".join(part for part in (self.phase, step) if part)
        if not self.module:
            return inside
        return f"{self.module} ({inside})" if inside else self.module


PHASE = PhaseTracker()
"""The tracker of this process."""


def track_modules(model: nn.Module, tracker: PhaseTracker = PHASE) -> None:
    """Lets `tracker.module` follow the model's layers and their halves from now on, forward and backward.

    Call it after torch has sharded or wrapped the model: torch's own hooks, which gather parameters, then run inside
    the module that they gather for. Compiled code has no hooks.
    """

    def entered_backward(name: str) -> None:
        # A module's output is that of its last part too, and that part's name says more.
        if not tracker.module.startswith(f"{name}."):
            tracker.module = name

    for name, module in model.named_modules():
        if not name or name.count(".") >= _TRACKED_DEPTH or isinstance(module, nn.ModuleDict | nn.ModuleList):
            continue

        def before_forward(module: nn.Module, inputs: Any, name: str = name) -> None:
            if not torch.compiler.is_compiling():
                tracker.module = name

        def after_forward(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling():
                output.register_hook(lambda gradient: entered_backward(name))

        module.register_forward_pre_hook(before_forward, prepend=True)
        module.register_forward_hook(after_forward, prepend=True)
