"""Preferences in a pipeline from end to end: cached columns, a reference that moves, statistics, and resumption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.pair_stage import trained_tensors
from builders.process_group import run_group
from builders.reference_stage import recipe_file, train
from builders.tiny_world import World
from builders.worst_errors import worst_relative_error

pytestmark = pytest.mark.distributed

PIPELINE = {"parallel": {"pipeline": 2}}
RUNS: dict[str, dict[str, Any]] = {
    "cached": {"reference": {"kind": "cached"}},
    "moving": {"reference": {"kind": "frozen", "every": 2, "mix": 0.6}},
    "adapter-off": {"reference": {"kind": "adapter-off"}, "adapter": {"kind": "lora", "modules_to_save": ["norm"]}},
    "running mean": {
        "objective": [{"kind": "bco", "shift": "running-mean"}],
        "reference": {"kind": "cached"},
        "adapter": {"kind": "pissa", "rank": 2},
    },
}
"""PiSSA starts as a part of the weights, so its column is of the policy with its new adapter."""
SHORT: dict[str, Any] = {"steps": 4, "evaluation": {"every": 2}, "checkpoint": {"every": 2}}


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "margin", "eval_loss", "eval_margin") if name in line]


def halved(run: Path, copy: Path) -> None:
    """A run as it was when it had half of its steps behind it."""
    shutil.copytree(run, copy)
    shutil.rmtree(max((copy / "checkpoints").glob("step-*")))
    for result in ("model", "adapter"):
        shutil.rmtree(copy / result, ignore_errors=True)


def test_a_pipeline_trains_what_one_process_does_and_either_goes_on_where_the_other_was(
    tiny_world: World, tmp_path: Path
) -> None:
    def file(name: str, run: str, **changes: Any) -> str:
        return recipe_file(tiny_world, tmp_path, f"{name}-{run}", **RUNS[run], **SHORT, **changes)

    assert train([file("alone", run) for run in RUNS]) == [0] * len(RUNS)
    shutil.rmtree(tmp_path / "cache")  # columns are computed anew, through the stages
    for run in RUNS:
        halved(tmp_path / f"alone-{run}", tmp_path / f"stages-from-one-{run}")
    files = [file(name, run, **PIPELINE) for name in ("stages", "stages-from-one") for run in RUNS]
    assert run_group(train, 2, files) == [[0] * len(files)] * 2
    for run in RUNS:
        halved(tmp_path / f"stages-{run}", tmp_path / f"one-from-stages-{run}")
    assert train([file("one-from-stages", run) for run in RUNS]) == [0] * len(RUNS)
    for run in RUNS:
        want, tensors = losses(tmp_path / f"alone-{run}"), trained_tensors(tmp_path / f"alone-{run}")
        for name in ("stages", "stages-from-one", "one-from-stages"):
            folder = tmp_path / f"{name}-{run}"
            assert losses(folder) == pytest.approx(want, abs=2e-5), folder.name
            assert trained_tensors(folder).keys() == tensors.keys(), folder.name
            assert worst_relative_error(trained_tensors(folder), tensors) < 2e-5, folder.name
