"""The runs below a folder, from their files: which are running, finished or stopped, and how far. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.core.file_lock import holder_of
from danlu.core.run_files import CHAIN, CHECKPOINTS, ENVIRONMENT, LOCK_FILE, METRICS, RECIPE, SUMMARY
from danlu.training.checkpoints.folders import best_checkpoint, list_checkpoints
from danlu.training.checkpoints.manifest import STATE
from danlu.training.criterion import LOSS

MAX_DEPTH = 4  # levels of folders that are searched
_BLOCK_BYTES = 1 << 16
_MAX_BYTES = 16 << 20  # of a metrics file, from its end: an evaluation that is longer ago is not shown

State = Literal["running", "finished", "stopped"]


@dataclass(frozen=True)
class RunInfo:
    """One run. Numbers that its files do not have are None."""

    folder: Path
    chain: Path | None  # the folder of the chain that it is a part of
    state: State
    pid: int | None  # of the process that trains it
    step: int  # that is behind; of a stopped run, the one it would go on from
    steps: int | None  # in all
    loss: float | None  # of the last step that was logged
    last: Mapping[str, Any]  # the line of metrics.jsonl of the same step; empty before the first
    evaluation_loss: float | None  # the last one
    best_evaluation_loss: float | None
    metric: str  # what evaluations are judged by
    evaluation_value: float | None  # of the metric, the last one
    best_evaluation_value: float | None
    seconds: float | None  # of training and evaluation
    changed: float  # seconds since the epoch: when something was written last


def find_runs(folder: Path) -> list[RunInfo]:
    """The run in `folder`, or those below it, by the time of the last change; links to folders are not followed.

    One that ended before its first step, such as a start that failed, is no run: it has nothing to go on from.
    """
    runs = [read_run(run) for run in _run_folders(folder)]
    begun = [info for info in runs if info.state != "stopped" or info.step or info.loss is not None]
    return sorted(begun, key=lambda info: (info.changed, str(info.folder)))


def runs_of_chain(folder: Path) -> list[RunInfo]:
    """The runs of a chain that have begun, in the order of their beginning; none of other folders."""
    if not (folder / CHAIN).is_file():
        return []
    return [read_run(folder / name) for name in _json(folder / CHAIN) if is_run(folder / name)]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, by the files that every run begins with."""
    return (folder / RECIPE).is_file() and (folder / ENVIRONMENT).is_file()


def read_run(folder: Path) -> RunInfo:
    """Reads the files of a run's folder; damaged or missing files leave their fields empty."""
    holder = holder_of(folder / LOCK_FILE)
    summary = {} if holder is not None else _json(folder / SUMMARY)
    last, evaluation = _last_lines(folder / METRICS)
    complete = [info for info in list_checkpoints(folder / CHECKPOINTS) if info.complete]
    state_json = _json(complete[-1].path / STATE) if complete else {}
    saved = complete[-1].step if complete else 0
    judged = [info.loss for info in complete if info.loss is not None]
    evaluations = summary.get("evaluation") or {}
    metric = (state_json.get("run") or {}).get("best_metric", LOSS.metric)
    named = evaluations if metric == LOSS.metric else summary.get("judged") or {}
    best = best_checkpoint(complete)
    state: State = "running" if holder is not None else "finished" if summary else "stopped"
    return RunInfo(
        folder=folder,
        chain=folder.parent if (folder.parent / CHAIN).is_file() else None,
        state=state,
        pid=None if holder is None else holder.pid,
        step=int(number(last.get("step")) or saved) if state == "running" else int(summary.get("steps", saved)),
        steps=_whole(state_json.get("total_steps")),
        loss=number(summary.get("loss", last.get("loss"))),
        last=last,
        evaluation_loss=number(evaluations.get("last", evaluation.get("eval_loss"))),
        best_evaluation_loss=number(evaluations.get("best", min(judged, default=None))),
        metric=metric,
        evaluation_value=number(named.get("last", evaluation.get(f"eval_{metric}"))),
        best_evaluation_value=number(named.get("best", None if best is None else best.value)),
        seconds=number(summary.get("seconds", last.get("elapsed_s"))),
        changed=max(map(_changed, (folder / METRICS, folder / SUMMARY, folder / RECIPE))),
    )


def _run_folders(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    for path, folders, _ in os.walk(folder):
        parent = Path(path)
        runs = [name for name in folders if is_run(parent / name)]
        yield from (parent / name for name in runs)
        at_max_depth = len(parent.relative_to(folder).parts) + 1 >= MAX_DEPTH
        folders[:] = [] if at_max_depth else [name for name in folders if name not in runs and not name.startswith(".")]


def _last_lines(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last step and the last evaluation of a metrics.jsonl, which may be written to meanwhile; {} for neither."""
    step: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for line in _lines_backwards(file):
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if not isinstance(fields, dict):
            continue
        if not evaluation and "eval_loss" in fields:
            evaluation = fields
        if not step and "loss" in fields:
            step = fields
        if step and evaluation:
            break
    return step, evaluation


def _lines_backwards(file: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first, read block by block; those of its last `_MAX_BYTES` only."""
    try:
        with file.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            lowest, rest = max(0, end - _MAX_BYTES), b""
            while end > lowest:
                start = max(lowest, end - _BLOCK_BYTES)
                handle.seek(start)
                rest, *lines = (handle.read(end - start) + rest).split(b"\n")
                yield from reversed(lines)
                end = start
            if not lowest:  # what is left is the first line, and whole
                yield rest
    except OSError:
        return


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def number(value: Any) -> float | None:
    """A number out of JSON, in which "nan" and "inf" stand for those that it does not have; None for anything else."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _whole(value: Any) -> int | None:
    given = number(value)
    return None if given is None or not math.isfinite(given) else int(given)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
