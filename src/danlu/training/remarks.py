"""Warnings about the metrics of steps, shown to people as a run goes on; the stage decides which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from danlu.core.types import StepMetrics
from danlu.training.metrics import Recorder, Value

Remark = Callable[[Mapping[str, float]], Iterable[str]]
"""Returns the warnings about a logged step, called in the order of steps."""


class Remarks:
    """A `Recorder` that asks for warnings about each logged step, and has another one show them.

    They are not in metrics.jsonl: warnings before an interruption are not known after it, and the lines of a resumed
    run are those of an uninterrupted one.
    """

    def __init__(self, remark: Remark, show: Recorder) -> None:
        self.remark, self.show = remark, show

    def step(self, metrics: StepMetrics) -> None:
        """Shows the warnings about a step."""
        for text in self.remark(metrics.extra):
            self.show.event(metrics.step, "remark", text=text)

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """Nothing is said of evaluations."""

    def event(self, step: int, event: str, **values: Value) -> None:
        """Ignores events."""

    def close(self) -> None:
        """Does nothing: there are no files to close."""
