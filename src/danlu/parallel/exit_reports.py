"""How each process of a run ended: a small file that it leaves, and what of many such files is told to the user.

Exit codes alone do not say it: gloo's threads may abort a process that has done all its work, and of four processes
that failed three failed only because the first was gone. Without torch, as the command line is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from danlu.errors import (
    CheckpointError,
    DanluError,
    DataError,
    InternalError,
    ModelError,
    RecipeError,
    ResourceError,
    TrainingError,
)
from danlu.parallel.world import format_ranks

Kind = Literal["begun", "finished", "stopped", "error", "failure", "hang", "consequence"]
"""begun: still at work, or died without a word; stopped: by a signal, saved what it could; error: a DanluError;
failure: any other exception; hang: waited too long for another; consequence: failed because another was gone."""

LOADED = "has loaded torch"
"""What a process that has begun says of itself when it is about to join the others."""

EXIT_REPORT = "DANLU_EXIT_REPORT"
"""The environment variable that names the file of a process."""

_ERRORS: dict[int, type[DanluError]] = {
    kind.exit_code: kind
    for kind in (
        DanluError,
        RecipeError,
        DataError,
        ModelError,
        CheckpointError,
        ResourceError,
        TrainingError,
        InternalError,
    )
}

_LESS_MEMORY = (
    "To need less memory set batch.micro lower, memory: {recompute: full}, or parallel: zero3; the start of the run "
    "says what a step is expected to hold"
)
_ROOM_BYTES = 64 << 10  # a text and a traceback

# What torch and its libraries say in a process whose peer is gone.
_PEER_IS_GONE = re.compile(
    r"gloo|transport/tcp|Connection (closed|reset|refused)|Broken pipe|NCCL|DistBackendError|TCPStore|recvValue"
    r"|socketPoll|failed to (recv|send)|Timed out waiting|remote process exited|Socket Timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ExitReport:
    """What one process says about itself."""

    rank: int
    kind: Kind
    exit_code: int = 0
    said: tuple[str, ...] = ()  # problems, one each; or the text of the error and its traceback
    at: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def well(self) -> bool:
        """Whether it did what it was asked to, which includes stopping."""
        return self.kind in ("finished", "stopped")

    def write(self, file: Path) -> None:
        """Puts it in the place of an earlier one at once; in room that the first has reserved, for a disk may be full
        by the time that there is something to say."""
        unfinished, room = file.with_name(f"{file.name}.tmp"), os.O_RDWR | os.O_CREAT
        content = json.dumps(asdict(self)).encode()
        with open(os.open(unfinished, room, 0o666), "r+b", buffering=0) as taken:
            taken.write(content)
            taken.truncate()
        unfinished.rename(file)
        if self.kind == "begun":
            with open(os.open(unfinished, room, 0o666), "r+b", buffering=0) as reserved:
                reserved.write(bytes(_ROOM_BYTES))


def read_report(file: Path) -> ExitReport | None:
    """What the process said; None if it never came so far."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return ExitReport(**{**values, "said": tuple(values["said"])})


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception only says that another process is gone or does not answer."""
    if isinstance(error, DanluError) or not isinstance(error, RuntimeError | OSError):
        return False
    return isinstance(error, ConnectionError) or bool(_PEER_IS_GONE.search(str(error)))


def write_report(report: ExitReport, environ: Mapping[str, str] = os.environ) -> None:
    """Leaves the file where whoever started this process wants one.

    torchrun names a file of its own, and shows what it finds there.
    """
    if EXIT_REPORT in environ:
        report.write(Path(environ[EXIT_REPORT]))
    elif "TORCHELASTIC_ERROR_FILE" in environ and report.kind in ("error", "failure", "hang"):
        text = {"message": "\n".join(report.said), "extraInfo": {"timestamp": int(report.at), "rank": report.rank}}
        Path(environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": text}), encoding="utf-8")


@dataclass(frozen=True)
class FailureCause:
    """Why a group of processes failed, the first reason first."""

    error: DanluError
    short: str  # one line
    again: bool  # whether another attempt may end otherwise


def failure_cause(
    reports: Mapping[int, ExitReport | None],
    exits: Mapping[int, int | None],
    logs: Mapping[int, Path],
    *,
    memory_kills: int = 0,
) -> FailureCause:
    """What is told of processes of which at least one failed.

    reports: what each left, by rank. exits: exit code, negative for a signal; None for one that was still running when
    the first failed. logs: where each wrote, for those that died without a word. memory_kills: processes that the
    system has counted as killed because memory ran out, since the group began.
    """
    died = {rank: code for rank, code in exits.items() if code is not None and _silent(reports[rank])}
    told = sorted(
        (report for report in reports.values() if report is not None and report.kind in ("error", "failure", "hang")),
        key=lambda report: report.at,
    )
    # A process is killed from outside, so others may fail of that, in words of any kind; but not in a DanluError's.
    killed = -signal.SIGKILL in died.values()
    if told and not (died and told[0].kind == "hang") and not (killed and told[0].kind == "failure"):
        first = [report for report in told if _same(report, told[0])]
        return _told(first, told, reports)
    if died:
        return _died(died, logs, reports, memory_kills)
    waited = [report for report in reports.values() if report is not None and report.kind == "consequence"]
    assert waited, "a group fails of at least one process"
    first = [min(waited, key=lambda report: report.at)]
    return _told(first, first, reports)


def stopped_by_signal(reports: Mapping[int, ExitReport | None], exits: Mapping[int, int | None]) -> ExitReport | None:
    """The process that a signal stopped at once, where the others failed of nothing else."""
    stopped = [one for one in reports.values() if one is not None and one.kind == "stopped" and one.said]
    others = [reports[rank] for rank, code in exits.items() if code is not None]  # else ended by the launcher
    if not stopped or not all(one is not None and (one.well or one.kind == "consequence") for one in others):
        return None
    return min(stopped, key=lambda report: report.at)


def _silent(report: ExitReport | None) -> bool:
    return report is None or report.kind == "begun"


def _same(one: ExitReport, other: ExitReport) -> bool:
    return one.kind == other.kind and (one.said == other.said or one.kind == "hang")


def _told(
    first: Sequence[ExitReport], told: Sequence[ExitReport], reports: Mapping[int, ExitReport | None]
) -> FailureCause:
    ranks = [report.rank for report in first]
    reason = first[0]
    everyone = len(ranks) == len(reports) or reason.kind == "hang"  # a hang's words name the ranks
    whose = "" if everyone else f"{format_ranks(ranks)}: "
    texts = list(reason.said)
    others = [report for report in told if report.rank not in ranks]
    texts += [f"{format_ranks([report.rank])} failed as well: {_headline(report)}" for report in others]
    texts += _folded(set(reports) - set(ranks) - {report.rank for report in others}, reports)
    kind = _ERRORS.get(reason.exit_code, DanluError)
    problems = [f"{whose}{texts[0]}", *texts[1:]]
    error = RecipeError(problems) if kind is RecipeError else kind("\n".join(problems))
    return FailureCause(error, f"{whose}{_headline(reason)}", again=reason.kind != "error")


def _died(
    died: Mapping[int, int], logs: Mapping[int, Path], reports: Mapping[int, ExitReport | None], memory_kills: int
) -> FailureCause:
    lines = []
    for code in sorted(set(died.values())):
        ranks = [rank for rank, its in died.items() if its == code]
        verb = "were" if len(ranks) > 1 else "was"
        if code >= 0:
            lines.append(f"{format_ranks(ranks)} ended with exit code {code} and without a word")
        elif -code == signal.SIGKILL:
            why = "because memory ran out" if memory_kills else "as the system does where memory runs out"
            lines.append(f"{format_ranks(ranks)} {verb} killed (SIGKILL), {why}")
        else:
            lines.append(f"{format_ranks(ranks)} {verb} ended by {_signal(-code)}")
    short = "; ".join(lines)
    folded = _folded(set(reports) - set(died), reports)
    if -signal.SIGKILL in died.values():
        folded.append(_LESS_MEMORY)
    return FailureCause(ResourceError("\n".join([short + _where(logs, died), *folded])), short, again=True)


def _folded(ranks: set[int], reports: Mapping[int, ExitReport | None]) -> list[str]:
    waited = [rank for rank in ranks if (report := reports[rank]) is not None and report.kind == "consequence"]
    return [f"{format_ranks(waited)} then stopped waiting"] if waited else []


def _where(logs: Mapping[int, Path], ranks: Mapping[int, object]) -> str:
    """The last words in the logs, if any."""
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
