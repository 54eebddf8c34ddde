"""The displays of a run for people: the console, its log in the run folder, and TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from danlu.core.run_files import CONSOLE, LOGS
from danlu.core.terminal import printable
from danlu.recipe import Recipe
from danlu.stages.protocols import Stage
from danlu.training.metrics import Recorder
from danlu.training.progress import LineProgress, progress_on
from danlu.training.recorders import OptionalRecorder, Remarks
from danlu.training.state import Run
from danlu.training.trackers import TensorBoard


class ConsoleLog:
    """The lines of the console, which also go into logs/console.txt of the run folder; a context manager.

    A run that goes on adds to the file; so does one whose console is silent. An error that leaves the block is written
    too. A disk that is full, or a folder that cannot be written, costs the file its lines, and the run nothing.

    folder: of the run; None for a process or a dry run that leaves no file.
    """

    def __init__(self, folder: Path | None, log: Callable[[str], None]) -> None:
        self._path = None if folder is None else folder / LOGS / CONSOLE
        self._log = log
        self.file: TextIO | None = None
        """The open file; None where there is none."""

    def __enter__(self) -> ConsoleLog:
        if self._path is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self.file = self._path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        self.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            label = "" if isinstance(error, KeyboardInterrupt) else "error: "
            self.write(f"{label}{str(error) or type(error).__name__}")
        if self.file is not None:
            with suppress(OSError):
                self.file.close()

    def log(self, line: str) -> None:
        """Shows a line on the console, and writes it."""
        self._log(line)
        self.write(line)

    def write(self, line: str) -> None:
        """Writes a line to the file alone."""
        if self.file is not None:
            with suppress(OSError, ValueError):  # ValueError: it is closed
                self.file.write(f"{printable(line)}\n")


def displays(
    recipe: Recipe, stage: Stage, counted: str, run: Run, stream: TextIO, console: ConsoleLog
) -> list[Recorder]:
    """Recorders that show the run to people on this machine, besides the metrics file.

    counted: the unit of throughput. stream: of the console.
    """
    assert run.metrics is not None, "the process that shows the run has the metrics"
    options: dict[str, Any] = {"total": run.cadence.total, "done": run.state.step, "counted": counted}
    options["every_step"] = "every" in recipe.log.model_fields_set  # else as often as somebody may want to read
    if stage.lead is not None:
        options["lead"] = stage.lead
    progress = {"the progress of steps": progress_on(stream, **options)}
    if console.file is not None:
        progress[f"{LOGS}/{CONSOLE}"] = LineProgress(console.file, **options)
    shows: list[Recorder] = [OptionalRecorder(each, name, console.log) for name, each in progress.items()]
    if stage.remarks is not None:
        remarks = Remarks(stage.remarks(recipe), progress.values())
        shows.append(OptionalRecorder(remarks, "remarks on steps", console.log))
    if recipe.log.tensorboard:
        board = TensorBoard(run.metrics.path.parent / "tensorboard", after_step=run.state.step)
        shows.append(OptionalRecorder(board, "log.tensorboard", console.log))
    return shows
