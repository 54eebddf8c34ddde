"""How each process of a run ended: a small file that each leaves, and the one cause of failure that follows from them.

Exit codes alone do not say it: gloo's threads may abort a process that has done all its work, and of four processes
that failed three may have failed only because the first was gone. Imports no torch, as the command line does not.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from danlu.core.errors import DanluError, RecipeError, ResourceError
from danlu.parallel.world import format_ranks

Kind = Literal["begun", "finished", "stopped", "error", "failure", "hang", "consequence"]
"""The kind of an exit report. begun: still at work, or died and left no other report; stopped: by a signal, after
saving what it could; error: a DanluError; failure: any other exception; hang: waited too long for another process in a
collective; consequence: failed because another process was gone.
"""

LOADED = "has loaded torch"
"""The message in the report of a process that has begun and is about to join the process group."""

EXIT_REPORT = "DANLU_EXIT_REPORT"
"""The environment variable with the path of a process's exit report."""

# The kinds of `danlu.core.errors`, each of which has an exit code of its own.
_ERRORS = {kind.exit_code: kind for kind in DanluError.__subclasses__()}

_LESS_MEMORY = (
    "To need less memory set batch.micro lower, memory: {recompute: full}, or parallel: zero3; the start of the run "
    "says what a step is expected to hold"
)
_RESERVED_BYTES = 64 << 10  # a message and a traceback

# Texts of exceptions of torch and its libraries in a process that has lost its peer.
_PEER_IS_GONE = re.compile(
    r"gloo|transport/tcp|Connection (closed|reset|refused)|Broken pipe|NCCL|DistBackendError|TCPStore|recvValue"
    r"|socketPoll|failed to (recv|send)|Timed out waiting|remote process exited|Socket Timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ExitReport:
    """How one process ended, as read from its report file."""

    rank: int
    kind: Kind
    exit_code: int = 0
    said: tuple[str, ...] = ()  # a message for each problem; or one message, which may end with a traceback
    at: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def succeeded(self) -> bool:
        """Whether the process did its task, which includes stopping on request."""
        return self.kind in ("finished", "stopped")

    def write(self, file: Path) -> None:
        """Replaces the report in `file`, atomically.

        The first report, of kind begun, reserves disk space for the next one, which is written into it: the disk may be
        full by then. Raises OSError.
        """
        temporary, flags = file.with_name(f"{file.name}.tmp"), os.O_RDWR | os.O_CREAT
        content = json.dumps(asdict(self)).encode()
        with open(os.open(temporary, flags, 0o666), "r+b", buffering=0) as stream:
            stream.write(content)
            stream.truncate()
        temporary.rename(file)
        if self.kind == "begun":
            with open(os.open(temporary, flags, 0o666), "r+b", buffering=0) as stream:
                stream.write(bytes(_RESERVED_BYTES))


def read_report(file: Path) -> ExitReport | None:
    """The report in `file`; None if the process never wrote one."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return ExitReport(**{**values, "said": tuple(values["said"])})


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception says no more than that another process is gone or does not answer."""
    if isinstance(error, DanluError) or not isinstance(error, RuntimeError | OSError):
        return False
    return isinstance(error, ConnectionError) or bool(_PEER_IS_GONE.search(str(error)))


def write_report(report: ExitReport, environ: Mapping[str, str] = os.environ) -> None:
    """Writes the report to the file named in the environment by the launcher of this process, if there is one.

    danlu's launcher names EXIT_REPORT, torchrun a file of its own format, which it shows. Raises OSError.
    """
    if EXIT_REPORT in environ:
        report.write(Path(environ[EXIT_REPORT]))
    elif "TORCHELASTIC_ERROR_FILE" in environ and report.kind in ("error", "failure", "hang"):
        text = {"message": "\n".join(report.said), "extraInfo": {"timestamp": int(report.at), "rank": report.rank}}
        Path(environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": text}), encoding="utf-8")


@dataclass(frozen=True)
class FailureCause:
    """Why a group of processes failed."""

    error: DanluError
    short: str  # one line
    may_retry: bool  # whether another attempt may end otherwise


def failure_cause(
    reports: Mapping[int, ExitReport | None],
    exits: Mapping[int, int | None],
    logs: Mapping[int, Path],
    *,
    memory_kills: int = 0,
) -> FailureCause:
    """The cause to report for a group of processes of which at least one failed.

    reports: of each process, by rank. exits: their exit codes, negative for a signal; None for a process that was still
    running when the first one failed. logs: their log files, for those that died without a report. memory_kills: how
    many processes the system has killed because memory ran out, since the group began.
    """
    died = {rank: code for rank, code in exits.items() if code is not None and _is_silent(reports[rank])}
    failed = _of_kinds(reports, "error", "failure", "hang")
    # A process is killed from outside, and others may fail because of that with exceptions of any kind; but not with a
    # DanluError.
    killed = -signal.SIGKILL in died.values()
    if failed and not (died and failed[0].kind == "hang") and not (killed and failed[0].kind == "failure"):
        first = [report for report in failed if _same_failure(report, failed[0])]
        return _reported_cause(first, failed, reports)
    if died:
        return _silent_cause(died, logs, reports, memory_kills)
    first = _of_kinds(reports, "consequence")[:1]
    assert first, "a group fails of at least one process"
    return _reported_cause(first, first, reports)


def stopped_by_signal(reports: Mapping[int, ExitReport | None], exits: Mapping[int, int | None]) -> ExitReport | None:
    """The report of the process that a signal stopped at once; None unless the others failed of nothing else."""
    stopped = [report for report in _of_kinds(reports, "stopped") if report.said]
    ended = [reports[rank] for rank, code in exits.items() if code is not None]  # else the launcher ends it
    if not stopped or not all(
        report is not None and (report.succeeded or report.kind == "consequence") for report in ended
    ):
        return None
    return stopped[0]


def _of_kinds(reports: Mapping[int, ExitReport | None], *kinds: Kind) -> list[ExitReport]:
    """The reports of some kinds, the earliest first."""
    chosen = (report for report in reports.values() if report is not None and report.kind in kinds)
    return sorted(chosen, key=lambda report: report.at)


def _is_silent(report: ExitReport | None) -> bool:
    """Whether a process has ended without a report."""
    return report is None or report.kind == "begun"


def _same_failure(report: ExitReport, first: ExitReport) -> bool:
    return report.kind == first.kind and (report.said == first.said or report.kind == "hang")


def _reported_cause(
    first: Sequence[ExitReport], failed: Sequence[ExitReport], reports: Mapping[int, ExitReport | None]
) -> FailureCause:
    """Returns the cause that processes report themselves.

    first: the reports of those that failed first and alike. failed: all reports that give a reason.
    """
    ranks = [report.rank for report in first]
    reason = first[0]
    everyone = len(ranks) == len(reports) or reason.kind == "hang"  # a hang's message names the ranks
    whose = "" if everyone else f"{format_ranks(ranks)}: "
    texts = list(reason.said)
    later = [report for report in failed if report.rank not in ranks]
    texts += [f"{format_ranks([report.rank])} failed as well: {_headline(report)}" for report in later]
    texts += _consequences(set(reports) - set(ranks) - {report.rank for report in later}, reports)
    kind = _ERRORS.get(reason.exit_code, DanluError)
    problems = [f"{whose}{texts[0]}", *texts[1:]]
    error = RecipeError(problems) if kind is RecipeError else kind("\n".join(problems))
    return FailureCause(error, f"{whose}{_headline(reason)}", may_retry=reason.kind != "error")


def _silent_cause(
    died: Mapping[int, int], logs: Mapping[int, Path], reports: Mapping[int, ExitReport | None], memory_kills: int
) -> FailureCause:
    """Returns the cause where processes died without a report. died: their exit codes, by rank."""
    lines = []
    for code in sorted(set(died.values())):
        ranks = [rank for rank in died if died[rank] == code]
        verb = "were" if len(ranks) > 1 else "was"
        if code >= 0:
            lines.append(f"{format_ranks(ranks)} ended with exit code {code} and without a word")
        elif -code == signal.SIGKILL:
            why = "because memory ran out" if memory_kills else "as the system does where memory runs out"
            lines.append(f"{format_ranks(ranks)} {verb} killed (SIGKILL), {why}")
        else:
            lines.append(f"{format_ranks(ranks)} {verb} ended by {_signal(-code)}")
    short = "; ".join(lines)
    notes = _consequences(set(reports) - set(died), reports)
    if -signal.SIGKILL in died.values():
        notes.append(_LESS_MEMORY)
    return FailureCause(ResourceError("\n".join([short + _ends_of_logs(logs, died), *notes])), short, may_retry=True)


def _consequences(ranks: set[int], reports: Mapping[int, ExitReport | None]) -> list[str]:
    """A line, or none, on those of `ranks` that failed because another was gone."""
    waited = ranks & {report.rank for report in _of_kinds(reports, "consequence")}
    return [f"{format_ranks(waited)} then stopped waiting"] if waited else []


def _ends_of_logs(logs: Mapping[int, Path], ranks: Iterable[int]) -> str:
    """The last lines of the logs of some ranks; empty where there are none."""
    texts = []
    for rank in ranks:
        if rank in logs and logs[rank].is_file():
            last = logs[rank].read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            texts += [f"\n  the end of {logs[rank]}:", *(f"\n    {line}" for line in last)] if last else []
    return "".join(texts)


def _headline(report: ExitReport) -> str:
    return report.said[0].splitlines()[0] if report.said and report.said[0] else report.kind


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
