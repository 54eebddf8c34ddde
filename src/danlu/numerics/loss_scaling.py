"""Dynamic loss scaling: keeps float16 gradients between underflow and overflow (arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from danlu.core.errors import CheckpointError, TrainingError


@dataclass(frozen=True)
class ScaleChange:
    """A change of the loss scale: halved after an overflow (the update is skipped), or doubled after a good stretch."""

    step: int
    before: float
    after: float
    overflow: bool

    def __str__(self) -> str:
        why = "float16 overflow, update skipped" if self.overflow else "no overflow for a while"
        return f"step {self.step}: loss scale {self.before:g} -> {self.after:g} ({why})"


@dataclass
class LossScaler:
    """A power of two that the loss is multiplied by before backward, and the gradient divided by after it.

    A step is: backward of `loss.total * scaler.scale`; `norm = clip_grad_norm(..., scale=1 / (weight * scaler.scale))`;
    `change = scaler.update(step, isfinite(norm))`; update the weights only if the norm was finite. Parameters and their
    gradients are float32 throughout; only activations are float16. Plain Python numbers: the same on every device, and
    exactly resumable from JSON.

    The floor is below 1 because losses are sums over tokens, which the number of tokens has scaled up already.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000  # good steps after which the scale is doubled
    floor: float = 2.0**-10
    ceiling: float = 2.0**24
    good_steps: int = 0  # since the last change
    overflows: int = 0  # over the whole run

    def update(self, step: int, finite: bool) -> ScaleChange | None:
        """Updates the scale after `step`, by whether its gradient was finite; returns the change, if there is one.

        Raises TrainingError when the gradient overflows at the smallest scale: scaling cannot help then.
        """
        old_scale = self.scale
        if not finite:
            self.overflows += 1
            self.good_steps = 0
            if old_scale <= self.floor:
                raise TrainingError(
                    f"step {step}: the gradient is not finite even at the smallest loss scale ({old_scale:g}), so "
                    "float16's range is not what fails. Lower optimizer.learning_rate, look at the rows of this step, "
                    "or use precision: bf16."
                )
            self.scale = max(self.floor, old_scale / 2)
            return ScaleChange(step, old_scale, self.scale, overflow=True)
        self.good_steps += 1
        if self.good_steps < self.growth_interval:
            return None
        self.good_steps = 0
        self.scale = min(self.ceiling, old_scale * 2)
        return ScaleChange(step, old_scale, self.scale, overflow=False) if self.scale != old_scale else None

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows": self.overflows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores `state()`. Raises CheckpointError if a value is missing."""
        if missing := {"scale", "good_steps", "overflows"} - state.keys():
            raise CheckpointError(f"loss scaling: the checkpoint lacks {', '.join(sorted(missing))}.")
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.overflows = int(state["overflows"])
