"""Study folders written by hand, for tests of what is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danlu.recipe.parameter_grid import Combination
from danlu.report.study_results import STUDY, study_json


def write_run(
    folder: Path,
    losses: Mapping[int, float] | None = None,
    evaluations: Mapping[int, float] | None = None,
    *,
    finished: bool = True,
    **changes: Any,
) -> Path:
    """A run folder with metrics.jsonl and, of a finished run, summary.json; nothing else."""
    folder.mkdir(parents=True)
    losses, evaluations = losses or {1: 4.0, 2: 3.0}, evaluations or {}
    lines: list[dict[str, Any]] = [{"step": step, "loss": loss} for step, loss in losses.items()]
    lines += [{"step": step, "eval_loss": loss} for step, loss in evaluations.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    eval_losses = list(evaluations.values())
    summary = {
        "steps": max(losses),
        "tokens": 1000,
        "seconds": 12.5,
        "tokens_per_second": 80.0,
        "peak_memory_bytes": 300 * 2**20,
        "parameters": 1000,
        "trained_parameters": 40,
        "loss": losses[max(losses)],
        "evaluation": {"last": eval_losses[-1], "best": min(eval_losses)} if eval_losses else None,
        "result": {"path": "model", "bytes": 2**20},
    }
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary | changes))
    return folder


def write_study(folder: Path, runs: Mapping[str, Mapping[str, str]]) -> Path:
    """study.json of runs by name, each with its values."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = list(next(iter(runs.values())))
    (folder / STUDY).write_text(study_json(keys, [Combination(name, values) for name, values in runs.items()]))
    return folder
