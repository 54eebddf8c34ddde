"""Recorders that wrap another: one that a run can do without, and one that warns about the metrics of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from danlu.core.types import StepMetrics
from danlu.training.metrics import Recorder, Value

Remark = Callable[[Mapping[str, float]], Iterable[str]]
"""Returns the warnings about a logged step, called in the order of steps."""


class OptionalRecorder:
    """A `Recorder` that passes everything on to another, until that one raises an error.

    The error is said once, and nothing is passed on after it: metrics.jsonl has all the numbers.

    Args:
        name  of the other one, for the message
        say   takes a line for the console
    """

    def __init__(self, recorder: Recorder, name: str, log: Callable[[str], None]) -> None:
        self._recorder, self._name, self._log = recorder, name, log
        self._is_on = True

    def step(self, metrics: StepMetrics) -> None:
        """Passes a step on."""
        self._attempt(lambda: self._recorder.step(metrics))

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """Passes an evaluation on."""
        self._attempt(lambda: self._recorder.evaluation(step, values))

    def event(self, step: int, event: str, **values: Value) -> None:
        """Passes an event on."""
        self._attempt(lambda: self._recorder.event(step, event, **values))

    def close(self) -> None:
        """Closes the other recorder, also where it has failed before; a further error is not reported then."""
        was_on = self._is_on
        self._is_on = True
        self._attempt(self._recorder.close, quiet=not was_on)

    def _attempt(self, record: Callable[[], None], *, quiet: bool = False) -> None:
        if not self._is_on:
            return
        try:
            record()
        except Exception as error:  # a package's own kinds, which have nothing in common
            self._is_on = False
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            if not quiet:
                self._log(
                    f"{self._name}: switched off for the rest of this run ({type(error).__name__}: "
                    f"{first.rstrip('.')}). Training goes on, and metrics.jsonl has everything"
                )


class Remarks:
    """A `Recorder` that asks for warnings about each logged step, and has others show them.

    They are not in metrics.jsonl: warnings before an interruption are not known after it, and the lines of a resumed
    run are those of an uninterrupted one.
    """

    def __init__(self, remark: Remark, shows: Iterable[Recorder]) -> None:
        self.remark, self.shows = remark, [*shows]

    def step(self, metrics: StepMetrics) -> None:
        """Shows the warnings about a step."""
        for text in self.remark(metrics.extra):
            for show in self.shows:
                show.event(metrics.step, "remark", text=text)

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """Nothing is said of evaluations."""

    def event(self, step: int, event: str, **values: Value) -> None:
        """Ignores events."""

    def close(self) -> None:
        """Does nothing: there are no files to close."""
