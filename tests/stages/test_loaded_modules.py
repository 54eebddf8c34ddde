"""Each stage imports what it needs, and no room that only other stages use."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, write_rows
from builders.torch_process import TorchProcess

from danlu.registry import resolve
from danlu.stages.table import STAGES, Part

MOST_MODULES = 264
"""Of danlu that `danlu.run.train` and the first step of a plain SFT load, without those of the plan of its steps, which
the first process alone makes."""
OF_ROLLOUTS = {"inference", "remote_engines", "rewards", "rl", "serving"}
PARTS = [
    (stage, field.name, part)
    for stage, row in STAGES.items()
    for field in fields(row)
    if isinstance(part := getattr(row, field.name), Part)
]
ARGUMENTS = {"builder": 2, "evaluation": 2, "items": 4}
"""What the parts of a stage are called with; the others with the recipe alone."""
PRINT_MODULES = """
import json, sys
def show():
    print(json.dumps(sorted(name.removeprefix("danlu.") for name in sys.modules if name.startswith("danlu."))))
import danlu.run.train
show()
"""
DRY_RUNS = """
from pathlib import Path
from danlu.recipe import load
from danlu.run.run_plan import RunPlan
RunPlan.planned = lambda self, micro=None: None
for file in sys.argv[1:]:
    danlu_train = sys.modules["danlu.run.train"].train
    danlu_train(load(Path(file)), log=lambda line: None, dry_run=True)
    show()
"""


def loaded(code: str, *arguments: Path) -> list[set[str]]:
    """The modules of danlu that a new process prints, each time it does."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return [set(json.loads(line)) for line in printed.splitlines()]


def rooms(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


@pytest.mark.parametrize(("stage", "field", "part"), PARTS, ids=[f"{stage}.{field}" for stage, field, _ in PARTS])
def test_each_name_in_the_table_is_a_part_that_takes_what_it_is_called_with(stage: str, field: str, part: Part) -> None:
    found = resolve(part.target)
    assert callable(found)
    arguments = [object()] * ARGUMENTS.get(field, 1)
    assert len(inspect.signature(found).bind(*arguments).args) == len(arguments)
    with pytest.raises(TypeError):  # control
        inspect.signature(found).bind(*arguments, *[object()] * 9)


def test_a_name_that_is_not_there_is_an_error_when_it_is_called() -> None:
    with pytest.raises(AttributeError, match="NoReader"):
        Part("reader:NoReader")(None)


def test_a_run_imports_no_rollouts(torch_process: TorchProcess) -> None:
    at_import = set(json.loads(torch_process.run(PRINT_MODULES).splitlines()[-1]))
    assert not rooms(at_import) & {*OF_ROLLOUTS, "adapters"}
    assert len(at_import) <= MOST_MODULES


def test_a_stage_imports_what_it_needs(tiny_world: World, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}] * 8)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}] * 8)
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def short(completions, **columns):\n    return [-float(len(each)) for each in completions]\n")
    common: dict[str, Any] = {"model": {"path": str(tiny_world.base), "config": None}, "schedule": None}
    small = {"data": {"max_length": 64}, "optimizer": None, "steps": 1, **common}
    files = [
        tiny_world.recipe(tmp_path / "sft", **small),
        tiny_world.recipe(
            tmp_path / "dpo", **small | {"stage": "dpo", "data": {"train": str(pairs)}, "batch": {"rows": 2}}
        ),
        tiny_world.recipe(
            tmp_path / "grpo",
            **small
            | {"stage": "grpo", "data": {"train": str(prompts)}, "batch": {"prompts": 2, "micro": 1}}
            | {"rewards": [f"{rewards}:short"], "rollout": {"samples": 2, "max_new_tokens": 4}},
        ),
    ]
    _, sft, dpo, grpo = loaded(PRINT_MODULES + DRY_RUNS, *files)
    assert len(sft) <= MOST_MODULES
    assert not rooms(sft) & {*OF_ROLLOUTS, "adapters"}
    assert {name for name in sft if name.startswith("models.families.")} == {
        "models.families.family",
        "models.families.layer_keys",
        "models.families.llama",
    }
    assert not rooms(dpo) & OF_ROLLOUTS
    assert "objectives.preference" in dpo - sft
    assert {"inference", "rewards", "rl"} <= rooms(grpo)
    assert not rooms(grpo) & {"remote_engines", "serving"}
