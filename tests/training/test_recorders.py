from __future__ import annotations

from typing import Any

from danlu.core.types import StepMetrics
from danlu.training.recorders import OptionalRecorder


class Failing:
    """A recorder that fails at some call, and counts those that come."""

    def __init__(self, at: int) -> None:
        self.calls: list[str] = []
        self._at = at

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) >= self._at:
            raise RuntimeError("api.wandb.ai: no route.\nmore")

    def step(self, metrics: StepMetrics) -> None:
        self._call(f"step {metrics.step}")

    def evaluation(self, step: int, values: Any) -> None:
        self._call(f"evaluation {step} {values}")

    def event(self, step: int, event: str, **values: Any) -> None:
        self._call(f"{event} {step} {values}")

    def close(self) -> None:
        self._call("close")


def record(recorder: Any) -> None:
    recorder.step(StepMetrics(1, 2.0, 0.5, 1e-4, 100, 80, 1000.0, 1 << 20, {}))
    recorder.evaluation(1, {"loss": 1.0})
    recorder.event(2, "spike", loss=9.0)
    recorder.close()


def test_everything_is_passed_on() -> None:
    said: list[str] = []
    inner = Failing(at=9)
    record(OptionalRecorder(inner, "log.wandb", said.append))
    assert inner.calls == ["step 1", "evaluation 1 {'loss': 1.0}", "spike 2 {'loss': 9.0}", "close"] and not said


def test_one_that_fails_is_switched_off_and_closed() -> None:
    for at, calls in ((1, 2), (2, 3), (3, 4), (4, 4)):
        said: list[str] = []
        inner = Failing(at=at)
        record(OptionalRecorder(inner, "log.wandb", said.append))
        assert len(inner.calls) == calls and inner.calls[-1] == "close"
        assert said == [
            "log.wandb: switched off for the rest of this run (RuntimeError: api.wandb.ai: no route). Training goes "
            "on, and metrics.jsonl has everything"
        ]
