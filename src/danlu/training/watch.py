"""Spike detection: whether a step's loss or gradient norm looks wrong. It only judges; the loop acts on it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from danlu.core.errors import CheckpointError
from danlu.recipe import sections

# A normal distribution's standard deviation is 1.4826 times its median absolute deviation.
_DEVIATIONS_PER_MAD = 1.4826
# Losses that hardly vary would make every wiggle a spike: a standard deviation is at least this share of the median.
_MIN_DEVIATION_SHARE = 0.005


class Watch:
    """Compares each loss with the recent good ones; a spike is `loss_spike` robust deviations above their median.

    Median and median absolute deviation, because one outlier moves a mean and a standard deviation so far that the next
    one passes. Spikes do not enter the window. After half a window of spikes in a row the level counts as the new
    normal (a mixture that changed, say) and the window starts afresh: skipping for ever would be to stop training.
    """

    def __init__(self, section: sections.Watch) -> None:
        self.section = section
        self._losses: deque[float] = deque(maxlen=section.window)
        self._spikes_in_a_row = 0

    def spike_reason(self, loss: float, grad_norm: float) -> str:
        """Returns why a step of this mean loss and gradient norm before clipping, both finite, is a spike; "" if it is
        none.

        Numbers that are not finite stop the run and are not judged here.
        """
        assert math.isfinite(loss) and math.isfinite(grad_norm), "a non-finite step stops the run before it is judged"
        problem = self._gradient_problem(grad_norm) or self._loss_problem(loss)
        if not problem:
            self._losses.append(loss)
            self._spikes_in_a_row = 0
            return ""
        self._spikes_in_a_row += 1
        if self._spikes_in_a_row >= self._half_window:
            self._losses.clear()
            self._spikes_in_a_row = 0
        return problem

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {"losses": list(self._losses), "spikes_in_a_row": self._spikes_in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from `state()`; CheckpointError if a value is missing."""
        if missing := {"losses", "spikes_in_a_row"} - state.keys():
            raise CheckpointError(f"watch: the checkpoint lacks {', '.join(sorted(missing))}.")
        self._losses = deque(map(float, state["losses"]), maxlen=self.section.window)
        self._spikes_in_a_row = int(state["spikes_in_a_row"])

    @property
    def _half_window(self) -> int:
        return max(1, self.section.window // 2)

    def _gradient_problem(self, grad_norm: float) -> str:
        limit = self.section.gradient_norm
        if limit is None or grad_norm <= limit:
            return ""
        return f"gradient norm {grad_norm:.4g} is above watch.gradient_norm {limit:g}"

    def _loss_problem(self, loss: float) -> str:
        if self.section.loss_spike is None or len(self._losses) < self._half_window:
            return ""
        middle = median(self._losses)
        deviation = _DEVIATIONS_PER_MAD * median(abs(seen - middle) for seen in self._losses)
        deviation = max(deviation, _MIN_DEVIATION_SHARE * abs(middle), 1e-12)
        if loss <= middle + self.section.loss_spike * deviation:
            return ""
        return (
            f"loss {loss:.4f} is {(loss - middle) / deviation:.1f} robust standard deviations above the median "
            f"{middle:.4f} of the last {len(self._losses)} good steps (watch.loss_spike {self.section.loss_spike:g})"
        )
