"""The record of a run, read for its report: while it is being written, too, and with torn or damaged lines.

Numbers and texts are other people's: only numbers become curves, and a line that is no JSON object is counted and left
out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.run_files import METRICS, RECIPE, SUMMARY
from danlu.core.small_files import parse_json
from danlu.core.terminal import printable
from danlu.recipe import Recipe, load_resolved

MAX_NAME = 100  # characters
MAX_NAMES = 500
"""The most metrics that are kept: a file that is no run's could have a new name in every line."""

Curve = dict[int, float]
"""A metric by step; a step that a rewind went through twice counts as it was in the end."""


@dataclass
class RunRecord:
    """A run as far as it has got."""

    folder: Path
    recipe: Recipe | None
    """None where this danlu cannot read the run's recipe any more."""
    steps: dict[str, Curve] = field(default_factory=dict)
    """Curves of steps by the metric's name."""
    evaluations: dict[str, Curve] = field(default_factory=dict)
    """Curves of evaluations by the metric's name, without `eval_`."""
    events: list[Mapping[str, Any]] = field(default_factory=list)
    """Events, without samples."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty until the run is finished."""
    damaged_lines: int = 0

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return max(self.steps.get("loss", {0: 0.0}), default=0)

    @property
    def steps_per_rollout(self) -> int:
        """Steps that are trained on one rollout of stage rl."""
        return 1 if self.recipe is None else self.recipe.batch.updates * self.recipe.batch.passes


def read_record(folder: Path) -> RunRecord:
    """Reads the metrics, the recipe and the summary of a run. Raises ResourceError for a file that cannot be read."""
    record = RunRecord(folder, _recipe(folder), summary=_summary(folder))
    for line in lines_of(folder / METRICS):
        if line is None or not isinstance(step := line.get("step"), int):
            record.damaged_lines += 1
        elif "event" in line:
            if line["event"] not in ("sample", "samples"):
                record.events.append(line)
        else:
            _add(record, step, line)
    _add_times(record)
    return record


def lines_of(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the objects of a file with one in each line, None for a line that is none; text after the last newline,
    which is perhaps being written, is left out. Nothing where there is no such file. Raises ResourceError."""
    try:
        with file.open("rb") as handle:
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                yield _object(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResourceError(f"{file}: cannot be read: {error.strerror}") from error


def number(value: Any) -> float | None:
    """A number out of JSON, in which "nan" and "inf" stand for those that it does not have; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _add(record: RunRecord, step: int, line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if name == "step" or (height := number(value)) is None:
            continue
        evaluated = name.startswith("eval_")
        curves = record.evaluations if evaluated else record.steps
        key = printable(name.removeprefix("eval_") if evaluated else name)[:MAX_NAME]
        if key in curves or len(curves) < MAX_NAMES:
            curves.setdefault(key, {})[step] = height


def _add_times(record: RunRecord) -> None:
    """Adds `step_s`, the seconds of each step, and `update_s`, the seconds of a step of stage rl apart from its
    rollout.

    The times of a rollout are in the lines of all its steps, and are kept for the first of them, which made it.
    """
    tokens, speed = record.steps.get("tokens", {}), record.steps.get("tokens_per_second", {})
    seconds = {step: tokens[step] / rate for step, rate in speed.items() if rate > 0 and step in tokens}
    if not seconds:
        return
    record.steps["step_s"] = seconds
    parts = [name for name in ("hand_over_s", "rollout_s", "reward_s", "scoring_s") if name in record.steps]
    if not parts:
        return
    for name in parts:
        curve = record.steps[name]
        record.steps[name] = {step: s for step, s in curve.items() if (step - 1) % record.steps_per_rollout == 0}
    record.steps["update_s"] = {
        step: max(0.0, whole - math.fsum(record.steps[name].get(step, 0.0) for name in parts))
        for step, whole in seconds.items()
    }


def _recipe(folder: Path) -> Recipe | None:
    try:
        return load_resolved(folder / RECIPE)
    except RecipeError:
        return None


def _summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run; empty for others."""
    try:
        content = json.loads((folder / SUMMARY).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
