"""Trains the runs of a study, each by a `danlu train` of its own.

A process of its own gives each run its own peak of memory, and lets the others go on when one fails. This file loads no
torch: compared with a run that trains, the study itself is small.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from danlu.core.errors import ResourceError
from danlu.core.run_files import RunLock
from danlu.core.stop_signals import INSISTENT_SIGNALS, heeded_signals
from danlu.core.terminal import write_to_stderr
from danlu.report.study_results import is_finished
from danlu.study.plan import Plan, PlannedRun, write_plan

POLL_S = 0.2  # between looks at the log of the run under way
MAX_LOG_LINES = 12  # of a failed run's log, in the message about it


class StudyObserver(Protocol):
    """Is called as runs are skipped, started, print something and end."""

    def run_skipped(self, run: PlannedRun) -> None: ...

    def run_started(self, run: PlannedRun) -> None: ...

    def run_printed(self, text: str) -> None:
        """`text`: the whole lines that the run under way has written to its log since the last call."""
        ...

    def run_ended(self, run: PlannedRun, failure: str | None) -> None:
        """`failure`: why the run failed; None for one that finished."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The end of a study."""

    finished: int  # runs
    total: int  # runs
    failed: tuple[str, ...]  # names of runs
    signal: int | None  # the number of the signal that stopped the study
    stopped_in: str | None  # the name of the run that was under way then

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the study before all runs were finished."""
        return self.signal is not None and self.finished < self.total


def launch(run: PlannedRun) -> subprocess.Popen[bytes]:
    """Starts `danlu train` of the run's recipe; its output is appended to its log.

    The process has a group of its own, so that Ctrl-C reaches it once: through `SignalForwarder`.
    """
    # -P: a file of the working directory that is named like a package (datasets.py) must not take its place.
    command = [sys.executable, "-P", "-m", "danlu", "train", str(run.recipe_file)]
    with run.log.open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )


class SignalForwarder:
    """Forwards each of `STOP_SIGNALS`, while entered, to the run under way, which saves and stops.

    A signal that was ignored before (`nohup`) stays so.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        for number in heeded_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def stopping(self) -> bool:
        """Whether a signal has been received."""
        return self.received is not None

    def forward_to(self, child: subprocess.Popen[bytes] | None) -> None:
        """Forwards signals to this process from now on, and at once the one that came while it was being started."""
        self._child = child
        if child is not None and self.received is not None:
            child.send_signal(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopping() and number not in INSISTENT_SIGNALS:
            return
        effect = "stops at once" if self.stopping() else "saves and stops; once more to stop it at once"
        # Of INT and TERM a second one stops the run at once; the terminal that was closed is the study's, not its own.
        self.received = number if number in INSISTENT_SIGNALS else signal.SIGTERM
        if self._child is not None:
            write_to_stderr(f"the run under way {effect}")  # print may find its own buffer half-written
            self._child.send_signal(self.received)


def run(plan: Plan, observer: StudyObserver) -> Outcome:
    """Trains the unfinished runs, in order. Another `danlu study` of the folder is kept out meanwhile.

    A run that fails is reported, and the next one begins. After a signal the run under way saves and stops, and no
    other begins. Raises ResourceError for a folder that cannot be written or is in use.
    """
    failed: list[str] = []
    stopped_in = None
    with RunLock(plan.folder), SignalForwarder() as forwarder:
        write_plan(plan)
        for planned in plan.runs:
            if forwarder.stopping():
                break
            if is_finished(planned.folder):
                observer.run_skipped(planned)
                continue
            observer.run_started(planned)
            start = planned.log.stat().st_size if planned.log.is_file() else 0
            try:
                child = launch(planned)
            except OSError as error:
                raise ResourceError(f"{planned.name}: its process cannot be started: {error}") from error
            forwarder.forward_to(child)
            code = _follow(child, planned.log, start, observer)
            forwarder.forward_to(None)
            if code and forwarder.stopping():
                stopped_in = planned.name
                break
            failure = _failure(code, planned.log, start) if code else None
            observer.run_ended(planned, failure)
            failed += [planned.name] if failure is not None else []
    finished = sum(is_finished(planned.folder) for planned in plan.runs)
    return Outcome(finished, len(plan.runs), tuple(failed), forwarder.received, stopped_in)


def _follow(child: subprocess.Popen[bytes], log: Path, start: int, observer: StudyObserver) -> int:
    """Waits for the end of a process and reports its log from byte `start` on; returns its exit code."""
    with log.open("rb") as output:
        output.seek(start)
        rest = b""
        while True:
            try:
                code: int | None = child.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                code = None
            whole, newline, rest = (rest + output.read()).rpartition(b"\n")
            if newline:
                observer.run_printed((whole + newline).decode(errors="replace"))
            if code is not None:
                return code


def _failure(code: int, log: Path, start: int) -> str:
    """Describes why a run failed: its error message, or the end of its output."""
    lines = [line for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
    shown = lines[-MAX_LOG_LINES:] if first is None else lines[first : first + MAX_LOG_LINES]
    if code < 0:
        name = signal.Signals(-code).name
        shown.append(f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else ""))
    return "\n".join(shown) or f"ended with exit code {code}"
