"""One process of several that run a verb together: where its output goes, and the exit report that it leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from danlu.cli.crash import as_danlu_error, without_traceback
from danlu.core.errors import DanluError, RecipeError, ResourceError, Stopped
from danlu.core.run_files import LOGS
from danlu.core.terminal import printable, write_to_descriptor
from danlu.parallel import exit_reports
from danlu.parallel.exit_reports import ExitReport
from danlu.parallel.world import World, format_ranks


def log_file(folder: Path, rank: int) -> Path:
    """The file that a process other than the first prints into."""
    return folder / LOGS / f"rank-{rank}.txt"


def exit_report_file(folder: Path, rank: int) -> Path:
    """The file with the exit report of a process."""
    return folder / LOGS / f"rank-{rank}.json"


def run_worker(world: World, body: Callable[[], int]) -> NoReturn:
    """Runs `body`, one process's share of a verb, and ends the process.

    body: calls `redirect_output` as soon as it knows the run's folder, and returns the exit code: 0, or 128 + the
    signal that stopped it. An error is left to the launcher in an exit report; where something else has started the
    processes, one of those that raised it prints it. Ends by os._exit: gloo's threads may abort a process that ends in
    the ordinary way.
    """
    terminal = os.dup(sys.stderr.fileno())
    try:
        _write_first_report(world)
        code = body()
        report = ExitReport(world.rank, "stopped" if code else "finished", code)
    except (Stopped, KeyboardInterrupt) as stop:
        message = str(stop) or "interrupted"
        _print(f"{message}\n")
        report = ExitReport(world.rank, "stopped", getattr(stop, "exit_code", 128 + signal.SIGINT), (message,))
    except BaseException as error:
        report = exit_report_of(world.rank, error)
    try:
        exit_reports.write_report(report)
        has_launcher = _launched()
    except OSError:  # a full disk, where not even the room for this could be reserved
        has_launcher = False
    if not report.succeeded:
        _print_error(world, report, terminal, is_reported=has_launcher)
    _print("")
    # The launcher would take a stopped process for one that failed, and end those that are still saving.
    os._exit(0 if report.succeeded and _launched() else report.exit_code)


def report_torch_loaded(world: World) -> None:
    """Lets the launcher know that this process has loaded torch, the longest part of its start."""
    with suppress(OSError):  # a disk that is full is reported when there is something to lose
        exit_reports.write_report(ExitReport(world.rank, "begun", said=(exit_reports.LOADED,)))


def redirect_output(world: World, folder: Path) -> Callable[[str], None]:
    """Redirects stdout and stderr of this process and its libraries to a file in the run's folder, except rank 0's.

    Returns a function that prints to the terminal all the same. Raises ResourceError if the file cannot be written.
    """
    terminal = os.dup(sys.stderr.fileno())

    def print_to_terminal(text: str) -> None:
        # By write(2): a progress bar of the main thread may hold Python's own stream.
        """Prints a line to the terminal, wherever stderr goes now."""
        write_to_descriptor(terminal, printable(f"\n{text}\n"))

    if not world.rank:
        return print_to_terminal
    file = log_file(folder, world.rank)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(log, f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n".encode())
    except OSError as error:
        raise ResourceError(
            f"{file}: cannot be written: {error.strerror}. Free some space, or choose another `output`"
        ) from error
    _print("")
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    return print_to_terminal


def exit_report_of(rank: int, error: BaseException) -> ExitReport:
    """The report of an error: a DanluError's text; else its meaning, the phase of the run, and the traceback."""
    process_group = _process_group()
    reported = error if process_group is None else process_group.error_to_report(error)
    if isinstance(reported, RecipeError):
        return ExitReport(rank, "error", reported.exit_code, tuple(reported.problems))
    if isinstance(reported, DanluError):
        return ExitReport(rank, "error" if reported is error else "hang", reported.exit_code, (str(reported),))
    where = "" if process_group is None else process_group.current_phase()
    trace = "".join(traceback.format_exception(error)).rstrip()
    if exit_reports.is_peer_failure(error):
        message = (
            "another process of this run is gone, or does not answer; what it said last is in its own log. "
            f"{type(error).__name__}{f' at {where}' if where else ''}: {error}\n{trace}"
        )
        return ExitReport(rank, "consequence", DanluError.exit_code, (message,))
    unexpected = as_danlu_error(error, where)
    return ExitReport(rank, "failure", unexpected.exit_code, (f"{unexpected}\n{trace}",))


def _write_first_report(world: World) -> None:
    """Reports that this process has begun, in a file with room for the report of how it ends."""
    try:
        exit_reports.write_report(ExitReport(world.rank, "begun"))
    except OSError as error:
        raise ResourceError(
            f"{os.environ[exit_reports.EXIT_REPORT]}: cannot be written: {error.strerror}. Free some space, or "
            "choose another `output`"
        ) from error


def _print(text: str) -> None:
    """Prints to stderr after flushing stdout; a log on a full disk takes nothing, and that ends no run."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(printable(text))
        sys.stderr.flush()


def _process_group() -> Any:
    """`danlu.parallel.process_group` where this process has loaded it, else None: an error before that is reported
    without loading torch, a second earlier."""
    return sys.modules.get("danlu.parallel.process_group")


def _launched() -> bool:
    """Whether `danlu train --processes` has started this process, and reads its exit report."""
    return exit_reports.EXIT_REPORT in os.environ


def _print_error(world: World, report: ExitReport, terminal: int, *, is_reported: bool) -> None:
    """Prints an error into this process's log, and to the terminal unless somebody else does.

    is_reported: whether the launcher will print it. Without a launcher the first process that fails does.
    """
    text = "".join(f"error: {said}\n" for said in report.said)
    in_a_log = not os.path.sameopenfile(terminal, sys.stderr.fileno())
    if in_a_log:
        _print(text)
    elif report.exit_code == RecipeError.exit_code and world.local_rank not in (0, None):
        return  # a recipe that cannot be read: the first process of this machine says it too
    if is_reported or (report.kind == "consequence" and report.rank):
        return
    process_group = _process_group()
    if process_group is None or process_group.is_first_to_report():
        source = "" if report.kind == "hang" or not report.rank else f"{format_ranks([report.rank])}: "
        if report.kind == "failure":
            text = f"error: {without_traceback(report.said[0], sys.argv[1:])}\n"
        write_to_descriptor(terminal, printable(text.replace("error: ", f"error: {source}", 1)))
