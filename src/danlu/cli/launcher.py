"""`danlu train R --processes N`: starts the processes through torch's elastic agent, and reports how they end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from danlu.cli.worker import exit_report_file, log_file
from danlu.core.errors import ResourceError, Stopped
from danlu.core.machine import oom_kill_count, usable_cores
from danlu.core.run_files import LOGS
from danlu.core.stop_signals import INSISTENT_SIGNALS, STOP_SIGNALS, heeded_signals
from danlu.parallel import exit_reports
from danlu.parallel.exit_reports import ExitReport, FailureCause
from danlu.parallel.process_group import LAUNCHER
from danlu.parallel.world import format_ranks

GRACE_S = 10.0
"""Seconds in which the other processes may notice by themselves that one is gone; then they are killed."""

LOOPBACK = "127.0.0.1"
# Signal to the launcher -> signal to its processes. A terminal sends QUIT too; such a run should be saved.
_STOP_SIGNALS = {
    number: number if number in INSISTENT_SIGNALS else signal.SIGTERM for number in (*STOP_SIGNALS, signal.SIGQUIT)
}


def launch(
    arguments: Callable[[int], Sequence[str]],
    processes: int,
    folder: Path,
    *,
    restarts: int = 0,
    threads: int | None = None,
    from_where: Callable[[], str] = lambda: "from the beginning",
    log: Callable[[str], None],
    grace_s: float = GRACE_S,
    progress_s: float | None = None,
) -> int:
    """Runs `python ARGUMENTS` in the processes of one process group, to their end.

    Args:
        arguments:  by the number of the attempt, 0 to `restarts`. Each process calls `danlu.cli.worker.run_worker`.
        folder:     of the run, which the processes print into.
        threads:    of each process, where OMP_NUM_THREADS is not set; by default an even share of the cores.
        from_where: where a restarted group begins, in words (``from step 500``).
        log:        takes lines for the console.
        grace_s:    as `GRACE_S`.
        progress_s: between lines about how many of the processes have started; None for none.

    Returns 0, or 128 + the signal that stopped the run. Raises the DanluError that the first failing process met.
    """
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{folder}: the run folder cannot be written: {error.strerror}") from error
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{LOOPBACK}:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr=LOOPBACK,
    )
    # torch's own messages about restarts and signals: those of this file say what to do.
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="danlu",
        local_world_size=processes,
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        entrypoint=sys.executable,
        max_restarts=restarts,
        monitor_interval=0.05,
        local_addr=LOOPBACK,
    )
    environment = WorkerEnvironment(folder, threads or usable_cores() // processes or 1)
    agent = Agent(spec, environment, folder, arguments, from_where, log, grace_s, progress_s)
    previous_handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS} if _in_main_thread() else {}
    try:
        agent.run()
    except SignalException as stopped:  # before the agent's own handlers were replaced
        agent.stopping = stopped.sigval
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        spec.rdzv_handler.shutdown()
    if agent.stopping is not None:
        return _stopped(agent.stopping, agent.exit_reports())
    if agent.cause is not None:
        raise agent.cause.error
    return max((report.exit_code for report in agent.exit_reports().values() if report is not None), default=0)


def _stopped(number: int, reports: Mapping[int, ExitReport | None]) -> int:
    """The exit code of a run that a signal stopped. Raises Stopped unless rank 0 has said how far it came.

    reports: by rank, None of a process that had not begun.
    """
    first = reports[0]
    if first is not None and first.succeeded:
        return first.exit_code or 0
    message = "stopped at once; the same command goes on from the last checkpoint, if there is one"
    for rank, report in reports.items():
        if report is not None and report.kind == "stopped" and report.said:
            message = f"{format_ranks([rank])}: {report.said[0]}"
    raise Stopped(number, message)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class WorkerEnvironment(LogsSpecs):
    """The environment of a process in addition to the agent's variables; the process redirects its own output."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__()
        self._folder = folder
        self._threads = threads

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank, environ in envs.items():
            environ[LAUNCHER] = str(os.getpid())
            environ[exit_reports.EXIT_REPORT] = str(exit_report_file(self._folder, rank))
            environ.setdefault("OMP_NUM_THREADS", str(self._threads))
            if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
                environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name may lead nowhere
        no_files = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=no_files,
            stderrs=no_files,
            tee_stdouts={},
            tee_stderrs={},
            error_files={rank: str(exit_report_file(self._folder, rank)) for rank in envs},
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._folder / LOGS)


class Agent(LocalElasticAgent):
    """torch's agent, which starts processes and restarts them; it goes by their exit reports, not by exit codes alone.

    Attributes:
        cause     why the last attempt failed; None after one that did not
        stopping  the signal that asked the run to stop, if any
    """

    def __init__(
        self,
        spec: WorkerSpec,
        environment: WorkerEnvironment,
        folder: Path,
        arguments: Callable[[int], Sequence[str]],
        from_where: Callable[[], str],
        log: Callable[[str], None],
        grace_s: float,
        progress_s: float | None,
    ) -> None:
        super().__init__(spec, environment, exit_barrier_timeout=10)  # for other machines: there are none
        self._folder, self._arguments, self._from_where = folder, arguments, from_where
        self._log, self._grace_s = log, grace_s
        self._processes = spec.local_world_size
        self._memory_kills = oom_kill_count()
        self._progress_s = progress_s  # None once all have started
        self._last_progress_at = time.monotonic()
        self._kill_at: float | None = None  # once processes were asked twice to stop
        self._heeded = {*heeded_signals(), signal.SIGQUIT}
        self.cause: FailureCause | None = None
        self.stopping: int | None = None

    def exit_reports(self) -> dict[int, ExitReport | None]:
        """The report that each process has left, by rank; None of one that has not begun.

        One machine has all processes, so their local number is their rank.
        """
        return {rank: exit_reports.read_report(exit_report_file(self._folder, rank)) for rank in range(self._processes)}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.stopping is not None:  # asked between two attempts
            raise SignalException(f"signal {self.stopping}", signal.Signals(self.stopping))
        spec = worker_group.spec
        attempt = spec.max_restarts - self._remaining_restarts
        spec.args = tuple(self._arguments(attempt))
        for rank in range(self._processes):
            exit_report_file(self._folder, rank).unlink(missing_ok=True)
        started: dict[int, Any] = super()._start_workers(worker_group)
        if _in_main_thread():  # in the place of those that the call above has installed
            for number in _STOP_SIGNALS:
                signal.signal(number, self._ask_to_stop if number in self._heeded else signal.SIG_IGN)
        return started

    def _popen(self) -> dict[int, Any]:
        assert self._pcontext is not None, "processes are watched after they have been started"
        return {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}  # type: ignore[attr-defined]

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal on to processes that are at work. One that has not begun has nothing to save."""
        if self.stopping is not None and number not in INSISTENT_SIGNALS | {signal.SIGQUIT}:
            return
        if self.stopping is not None and self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_s
        self.stopping = number
        reports = self.exit_reports()
        for rank, process in self._popen().items():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if reports[rank] is None else _STOP_SIGNALS[signal.Signals(number)])

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        exits = {rank: process.poll() for rank, process in self._popen().items()}
        reports = self.exit_reports()
        self._report_progress(reports)
        ended = {rank: report for rank, report in reports.items() if exits[rank] is not None}
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_all()  # they wait in C++ for one that does not come, where no signal reaches them
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        if all(report is not None and report.succeeded for report in ended.values()):
            if len(ended) < self._processes:
                return RunResult(WorkerState.HEALTHY)
            self.cause = None
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(reports))
        exits |= self._wait_and_kill()
        self._find_cause(exits)
        return RunResult(WorkerState.FAILED)

    def _report_progress(self, reports: Mapping[int, ExitReport | None]) -> None:
        """Says how many processes have loaded torch: of many on few cores that takes minutes without another sign."""
        now = time.monotonic()
        if self._progress_s is None or now - self._last_progress_at < self._progress_s:
            return
        started = sum(each is not None and (each.kind != "begun" or bool(each.said)) for each in reports.values())
        self._last_progress_at = now
        if started == self._processes:
            self._progress_s = None
        else:
            self._log(f"starting: {started} of {self._processes} processes have loaded torch")

    def _wait_and_kill(self) -> dict[int, int | None]:
        """Waits for the others to fail by themselves. Returns exit codes by rank, None of those that were killed."""
        until = time.monotonic() + self._grace_s
        running = self._popen()
        while time.monotonic() < until and any(process.poll() is None for process in running.values()):
            time.sleep(0.02)
        return self._kill_all()

    def _kill_all(self) -> dict[int, int | None]:
        """Kills the processes that still run. Returns exit codes by rank, None for those that were killed."""
        exits = {rank: process.poll() for rank, process in self._popen().items()}
        for rank, process in self._popen().items():
            if exits[rank] is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that read its data
                process.wait()
        return exits

    def _find_cause(self, exits: Mapping[int, int | None]) -> None:
        """Finds why the processes failed, and decides whether they are restarted."""
        reports = self.exit_reports()
        if self.stopping is None and (alone := exit_reports.stopped_by_signal(reports, exits)) is not None:
            self.stopping = alone.exit_code - 128
        self.cause = exit_reports.failure_cause(
            reports,
            exits,
            {rank: log_file(self._folder, rank) for rank in range(1, self._processes)},
            memory_kills=(oom_kill_count() or 0) - (self._memory_kills or 0),
        )
        allowed = self._worker_group.spec.max_restarts
        if self.stopping is not None or not self.cause.may_retry:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            number = allowed - self._remaining_restarts + 1
            self._log(f"{self.cause.short}; restart {number} of {allowed}, {self._from_where()}")
        elif allowed:
            error = self.cause.error
            times = "time" if allowed == 1 else "times"
            error.args = (f"{error}\nThe processes were started again {allowed} {times} (parallel.restarts)",)
