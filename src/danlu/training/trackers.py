"""Live curves outside the run folder's own file: TensorBoard and Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.run_files import WANDB_ID_FILE
from danlu.core.types import StepMetrics
from danlu.training.metrics import Value, step_fields

_FLUSH_S = 10  # a kill loses at most this much of the curves; metrics.jsonl loses nothing


class TensorBoard:
    """Writes event files into `folder`; scalars are tagged train/NAME and eval/NAME, generated samples are texts.

    Args:  after_step  the run goes on after this step: later points of an earlier process are hidden.

    All scalars of a step make one event, given to TensorBoard's own writer thread: 40 us a step for eight of them,
    against 200 us with torch's SummaryWriter. Raises ResourceError when the files cannot be written, except on closing:
    metrics.jsonl has all the numbers.
    """

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        # Here, not above: 0.1 s and 5 MiB that a run without TensorBoard need not pay.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor, self._shape = event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        self._folder = folder
        with self._explained():
            self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        if after_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=after_step + 1, session_log=start))

    def step(self, metrics: StepMetrics) -> None:
        self._scalars(metrics.step, "train", step_fields(metrics))

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        self._scalars(step, "eval", values)

    def event(self, step: int, event: str, **values: Value) -> None:
        lines = "\n\n".join(f"**{name}**: {value}" for name, value in values.items())
        text = self._tensor.TensorProto(
            dtype="DT_STRING",
            string_val=[lines.encode()],
            tensor_shape=self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=1)]),
        )
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text", content=b"")
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        # The text board shows only tags that end so.
        self._add(step, [self._summary.Summary.Value(tag=f"{event}/text_summary", metadata=metadata, tensor=text)])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns the system's errors into messages that advise the user."""
        try:
            yield
        except OSError as error:
            raise ResourceError(
                f"{self._folder}: TensorBoard's files cannot be written: {error.strerror or error}. "
                "Free some space, or set log.tensorboard: false."
            ) from error

    def _write(self, event: Any) -> None:
        with self._explained():  # also of an earlier event: they are written in another thread
            self._writer.add_event(event)

    def _scalars(self, step: int, prefix: str, values: Mapping[str, Value]) -> None:
        value = self._summary.Summary.Value
        numbers = _numbers(values)
        self._add(step, [value(tag=f"{prefix}/{name}", simple_value=number) for name, number in numbers.items()])

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._write(self._event.Event(wall_time=time.time(), step=step, summary=summary))


class WandB:
    """Sends the run to Weights & Biases under one id for all its resumptions, kept in the run folder.

    Args:
        project  W&B project
        folder   the run folder; W&B keeps its own files there too
        config   the configuration on the run's page (the resolved recipe)

    W&B ignores points of steps it has already seen: after a rewind its curves lack the second pass.
    Raises RecipeError when the wandb package is not installed, ResourceError when W&B does not let a run begin: without
    a login, or without a network after WANDB_INIT_TIMEOUT seconds (90 by default).
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        if problem := wandb_problem():
            raise RecipeError(problem)
        import wandb  # optional: `pip install danlu[wandb]`

        id_file = folder / WANDB_ID_FILE
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=project, dir=str(folder), config=dict(config), id=id_file.read_text().strip(), resume="allow"
            )
        except Exception as error:  # UsageError, AuthenticationError, CommError, and what lies below them
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ResourceError(
                f"log.wandb: W&B does not let the run begin: {first.rstrip('.')}. Run `wandb login` (or set "
                "WANDB_API_KEY) and look at the network; or set WANDB_MODE=offline, which keeps the curves in the run "
                "folder for `wandb sync`; or leave log.wandb out"
            ) from error

    def step(self, metrics: StepMetrics) -> None:
        self._log(metrics.step, "train", step_fields(metrics))

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        self._log(step, "eval", values)

    def event(self, step: int, event: str, **values: Value) -> None:
        text = ", ".join(f"{name}: {value}" for name, value in values.items())
        self._run.log({f"event/{event}": text}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _log(self, step: int, prefix: str, values: Mapping[str, Value]) -> None:
        self._run.log({f"{prefix}/{name}": number for name, number in _numbers(values).items()}, step=step)


def wandb_problem() -> str | None:
    """Explains why `log.wandb` cannot be honoured here, before anything heavy starts; None when it can."""
    if importlib.util.find_spec("wandb") is None:
        return "log.wandb: the wandb package is not installed. Run `pip install wandb`, or leave log.wandb out."
    return None


def _numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """The values that can be drawn as curves. Non-finite numbers stay: a gap in a curve would hide them."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
    return {name: float(value) if math.isfinite(value) else value for name, value in numbers.items()}
