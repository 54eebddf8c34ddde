"""The runs below a folder, told from what is on disk: which go on, which are through, how far they came. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.file_lock import holder_of
from danlu.train.checkpoints.folders import list_checkpoints
from danlu.train.checkpoints.manifest import STATE
from danlu.train.run_lock import LOCK_FILE

# As `run_folder` and `summary` have them, which load torch.
RECIPE, ENVIRONMENT, METRICS, CHECKPOINTS, SUMMARY = (
    "recipe.yaml",
    "environment.json",
    "metrics.jsonl",
    "checkpoints",
    "summary.json",
)

DEEPEST = 4  # levels of folders that are looked through
_BLOCK_BYTES = 1 << 16
_MAX_BYTES = 16 << 20  # of a metrics file, from its end: an evaluation that is longer ago is not told

State = Literal["running", "finished", "stopped"]


@dataclass(frozen=True)
class RunInfo:
    """One run. Numbers that its files do not tell are None."""

    folder: Path
    state: State
    pid: int | None  # of the process that trains it
    step: int  # that is behind; of a stopped run, the one it would go on from
    steps: int | None  # in all
    loss: float | None  # of the last step that was logged
    evaluation_loss: float | None  # the last one
    best_evaluation_loss: float | None
    seconds: float | None  # of training and evaluation
    changed: float  # seconds since the epoch: when something was written last


def find_runs(folder: Path) -> list[RunInfo]:
    """The run in `folder`, or those below it, by the time of the last change; links to folders are not followed."""
    found = [read_run(run) for run in _run_folders(folder)]
    return sorted(found, key=lambda info: (info.changed, str(info.folder)))


def is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file() and (folder / ENVIRONMENT).is_file()


def read_run(folder: Path) -> RunInfo:
    """What the files of a run's folder say; those that are damaged or gone say nothing."""
    holder = holder_of(folder / LOCK_FILE)
    summary = {} if holder is not None else _json(folder / SUMMARY)
    last, evaluation = _last_lines(folder / METRICS)
    complete = [info for info in list_checkpoints(folder / CHECKPOINTS) if info.complete]
    kept = _json(complete[-1].path / STATE) if complete else {}
    saved = complete[-1].step if complete else 0
    judged = [info.loss for info in complete if info.loss is not None]
    evaluations = summary.get("evaluation") or {}
    state: State = "running" if holder is not None else "finished" if summary else "stopped"
    return RunInfo(
        folder=folder,
        state=state,
        pid=None if holder is None else holder.pid,
        step=int(_number(last.get("step")) or saved) if state == "running" else int(summary.get("steps", saved)),
        steps=_whole(kept.get("total_steps")),
        loss=_number(summary.get("loss", last.get("loss"))),
        evaluation_loss=_number(evaluations.get("last", evaluation.get("eval_loss"))),
        best_evaluation_loss=_number(evaluations.get("best", min(judged, default=None))),
        seconds=_number(summary.get("seconds", last.get("elapsed_s"))),
        changed=max(map(_changed, (folder / METRICS, folder / SUMMARY, folder / RECIPE))),
    )


def _run_folders(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    for place, folders, _ in os.walk(folder):
        here = Path(place)
        runs = [name for name in folders if is_run(here / name)]
        yield from (here / name for name in runs)
        deep = len(here.relative_to(folder).parts) + 1 >= DEEPEST
        folders[:] = [] if deep else [name for name in folders if name not in runs and not name.startswith(".")]


def _last_lines(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last step and the last evaluation of a metrics.jsonl, which may be written to meanwhile; {} for neither."""
    step: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for line in _from_the_end(file):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if not isinstance(told, dict):
            continue
        if not evaluation and "eval_loss" in told:
            evaluation = told
        if not step and "loss" in told:
            step = told
        if step and evaluation:
            break
    return step, evaluation


def _from_the_end(file: Path) -> Iterator[bytes]:
    """Whole lines, the last one first."""
    try:
        with file.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            least, rest = max(0, end - _MAX_BYTES), b""
            while end > least:
                start = max(least, end - _BLOCK_BYTES)
                handle.seek(start)
                rest, *lines = (handle.read(end - start) + rest).split(b"\n")
                yield from reversed(lines)
                end = start
            if not least:
                yield rest
    except OSError:
        return


def _json(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _number(value: Any) -> float | None:
    """Of JSON, where "nan" and "inf" stand for numbers that it does not have."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _whole(value: Any) -> int | None:
    found = _number(value)
    return None if found is None or not math.isfinite(found) else int(found)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
