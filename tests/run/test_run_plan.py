"""A run writes its plan, and what its steps took stands next to it in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu

from danlu.core.run_files import PLAN, REPORT, SUMMARY
from danlu.core.safetensors_format import read_header

COUNTED = ("weights", "adapter", "gradients", "optimizer", "average")
"""Parts that are exact."""


def test_a_run_compares_its_plan_with_what_it_took(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = tiny_world.recipe(run, steps=3, ema=0.9, checkpoint={"every": 3})
    assert danlu("train", recipe) == 0
    plan: dict[str, Any] = json.loads((run / PLAN).read_text())
    assert plan["documents"]["source"] == "token cache" and plan["batch"]["micro"] == 2
    compared = json.loads((run / SUMMARY).read_text())["plan"]
    memory = compared["memory"]
    assert all(memory[part]["expected"] == memory[part]["measured"] for part in COUNTED)
    assert memory["average"]["measured"] > 0 and compared["seconds"]["measured"] > 0
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    stored = [entry.bytes for file in checkpoint.glob("*.safetensors") for entry in read_header(file).values()]
    assert plan["checkpoint_bytes"] == sum(stored)
    capsys.readouterr()

    assert danlu("plan", run, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"plan": plan, "measured": compared}
    assert danlu("plan", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "== expected and measured, by part" in lines
    assert danlu("report", run) == 0
    assert "expected when it began, and measured" in capsys.readouterr().out
    assert "<h2>Plan</h2>" in (run / REPORT).read_text()
    assert danlu("plan", run, "steps=3", "--on", "H100-80G") != 0
    assert "--on, key=value: not with the folder of a run" in capsys.readouterr().err

    assert danlu("plan", recipe, "optimizer=sgd", "--json") == 0  # control: another recipe's plan differs
    other = json.loads(capsys.readouterr().out)["memory"]["parts"]
    assert other["optimizer"] != memory["optimizer"]["measured"] and other["weights"] == memory["weights"]["measured"]

    (run / PLAN).write_bytes((run / PLAN).read_bytes()[:-20])
    assert danlu("plan", run) != 0
    assert "not the plan of a run, or torn" in capsys.readouterr().err
    assert danlu("report", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"] is None
