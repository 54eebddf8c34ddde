"""metrics.jsonl: one JSON object a line, for every step, evaluation and event of a run.

::

    {"step": 10, "loss": 3.21, "grad_norm": 0.91, "learning_rate": 0.0002, "tokens": 8192, ...}     a step
    {"step": 10, "eval_loss": 3.4, "eval_perplexity": 29.9, ...}                                   an evaluation
    {"step": 12, "event": "overflow", "scale": 32768.0}                                            an event

JSON has no NaN and no infinity; they are written as the strings "nan", "inf" and "-inf", which float() reads back.
Lines are on the disk before the checkpoint that counts them, so a resumed run cuts the file after its checkpoint and
then writes the lines of an uninterrupted one, except for the fields in `TIMING_FIELDS`.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from danlu.core.errors import ResourceError
from danlu.core.line_log import LineLog
from danlu.core.terminal import print_status
from danlu.core.types import SECONDS_OF_ITEMS, StepMetrics

Value = float | int | str | bool | None

TIMING_FIELDS = SECONDS_OF_ITEMS | {
    "tokens_per_second", "memory_bytes", "mfu", "step_s", "eval_s", "elapsed_s", "time",
}  # fmt: skip
"""Fields that depend on the machine and the moment. All others are the same in each run of one recipe."""


_NOT_FINITE = {"nan", "inf", "-inf"}


class Recorder(Protocol):
    """Records the events of a run: the metrics file, the console, TensorBoard, W&B.

    A generated sample is the event "sample" with `prompt` and `text`; values of all samples of an evaluation together
    are the event "samples".
    """

    def step(self, metrics: StepMetrics) -> None:
        """An optimizer step is done."""

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """An evaluation after `step` is done; `values` are its metrics by name."""

    def event(self, step: int, event: str, **values: Value) -> None:
        """Something else happened in `step`: "overflow", "spike", "rewind", "sample", ..."""

    def close(self) -> None:
        """Ends the record: writes everything that is not written yet, and closes files."""


class MetricsLog(LineLog):
    """The metrics.jsonl of a run, which is on the disk before a checkpoint that counts its lines.

    Lines are counted, not steps: an evaluation may be of a checkpoint's own step and yet come after it, and a rewind
    goes through steps twice. Lines that the disk has no room for wait in memory, which is said once: only `sync`, for a
    checkpoint, raises ResourceError.
    """

    def __init__(self, path: Path, log: Callable[[str], None] = print_status) -> None:
        super().__init__(path)
        self._log = log
        self._waiting: list[str] = []
        self._has_said = False

    def append(self, line: str) -> None:
        """Adds a line, given without its end."""
        self._waiting.append(line)
        try:
            self._write_waiting()
        except ResourceError as error:
            if not self._has_said:
                self._log(f"{error} Lines of metrics wait in memory, and training goes on to the next checkpoint")
            self._has_said = True

    def sync(self) -> None:
        """Return when every line is on the disk. Raises ResourceError where it has no room for one."""
        self._write_waiting()
        super().sync()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd >= 0:
            with suppress(ResourceError):  # it was said when the line came
                self._write_waiting()
        super().close()

    def _write_waiting(self) -> None:
        while self._waiting:
            super().append(self._waiting[0])
            del self._waiting[0]

    def step(self, metrics: StepMetrics) -> None:
        """Logs one optimizer step, with the fields of `extra` next to the others."""
        self._append(step_fields(metrics))

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """Log one evaluation after `step`; each name gets the prefix `eval_`."""
        self._append({"step": step, **{f"eval_{name}": value for name, value in values.items()}})

    def event(self, step: int, event: str, **values: Value) -> None:
        """Log something that happened in `step`: "overflow", "spike", "rewind", ..."""
        self._append({"step": step, "event": event, **values})

    def _append(self, fields: Mapping[str, Value]) -> None:
        self.append(json.dumps({name: json_value(value) for name, value in fields.items()}, allow_nan=False))


def step_fields(metrics: StepMetrics) -> dict[str, Value]:
    """`metrics` as one flat mapping. Raises ValueError when `extra` names a field of StepMetrics again."""
    fields: dict[str, Value] = asdict(metrics)
    del fields["extra"]
    if clash := sorted(metrics.extra.keys() & fields.keys()):
        raise ValueError(f"extra metrics may not replace {', '.join(clash)}")
    return {**fields, **metrics.extra}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, with "nan", "inf" and "-inf" as floats again."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [
        {name: float(value) if value in _NOT_FINITE else value for name, value in json.loads(line).items()}
        for line in whole.splitlines()
    ]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory so far: allocated by tensors on a CUDA device, resident for the whole process on the CPU.

    If a process's model lies on several CUDA devices, this is their sum: it has nothing on others.
    """
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count()))
    if sys.platform == "linux":
        # VmHWM, not ru_maxrss: a process started by a larger one inherits the latter's ru_maxrss.
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def json_value(value: Value) -> Value:
    """The value as metrics.jsonl has it: JSON has no NaN and no infinity, so they are strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
