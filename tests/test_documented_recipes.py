"""Recipes in README and docs train as they are written, but for the model, the data and the size of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.docs_scripts import TOP
from builders.tiny_world import danlu, write_rows

from danlu.data.tokenizer_training import CHATML
from danlu.recipe.other_stages import other_stages
from danlu.recipe.stage_names import OBJECTIVE_NAMES

pytestmark = [pytest.mark.end_to_end, pytest.mark.usefixtures("tokenising_here")]

BLOCK = re.compile(r"(?:^ {4}.*\n|^\n(?= {4}))+", re.MULTILINE)
SIZE = [
    "data.cache=cache",
    "precision=fp32",
    "threads=1",
    "checkpoint.every=8",
    "log.tensorboard=false",
]
ROLLOUT = ["rollout.samples=2", "rollout.max_new_tokens=8"]


def documented() -> dict[str, dict[str, Any]]:
    """The recipes of README and docs, by page and line; of those that are alike once `replaced`, the first."""
    found: dict[str, dict[str, Any]] = {}
    for page in [TOP / "README.md", TOP / "README.zh-CN.md", *sorted((TOP / "docs").glob("*.md"))]:
        if page.name == "first_tasks.md":  # its commands are run as they stand: test_first_tasks.py
            continue
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if not re.search(r"^ {4}stage: ", block[0], re.MULTILINE):
                continue
            values = yaml.safe_load("\n".join(line.removeprefix("    ") for line in block[0].splitlines()))
            if values["stage"] in [each.stage for each in other_stages()]:  # their own tests read them
                continue
            if replaced(values) not in map(replaced, found.values()):
                found[f"{page.name}:{text.count(chr(10), 0, block.start()) + 1}"] = values
    return found


@pytest.fixture(scope="module")
def world(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stories260K under a chat template, rows for each stage, and a reward model."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "chatml.jinja").write_text(CHATML, encoding="utf-8")
    rows = json.loads((shared_data / "instruct" / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    write_rows(folder / "instructions.jsonl", [row for row in rows if 100 < len(row["output"]) < 300][:16])
    pairs = json.loads((shared_data / "preference" / "dpo_en_demo.json").read_text(encoding="utf-8"))
    write_rows(folder / "pairs.jsonl", pairs[:80])
    sums = (shared_data / "rl" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    write_rows(folder / "sums.jsonl", [line for line in sums if len(json.loads(line)["question"]) < 150][:60])
    (folder / "model").symlink_to(shared_data / "weights" / "stories260K-hf")
    return folder


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for file in world.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def replaced(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the model and the data of `world`; what these say besides stays."""
    stage = OBJECTIVE_NAMES.get(values["stage"], (values["stage"], ""))[0]
    rows = {"preference": "pairs.jsonl", "reward": "pairs.jsonl", "rl": "sums.jsonl"}.get(stage, "instructions.jsonl")
    given = values.get("data")
    data = {**(given if isinstance(given, dict) else {}), "train": rows}
    if "eval" in data:
        data["eval"] = 4
    if stage == "rl" and "prompt" not in data:
        data["prompt"] = "{question}"
    changed = {**values, "model": {"path": "model", "chat_template": "chatml.jinja"}, "data": data, "output": "run"}
    if "teacher" in values:
        changed["teacher"] = "model"
    if "rewards" in values:
        changed["rewards"] = [
            {**each, "path": "reward"} if each["kind"] == "model" else each for each in values["rewards"]
        ]
    return changed


RECIPES = documented()


def size_of(stage: str) -> list[str]:
    """Overrides that make a run of eight steps short.

    Each step of stages sft and distill has all rows, so that losses differ by what was learnt alone. The losses of the
    other stages begin at the same value whatever the rows are.
    """
    stage, _ = OBJECTIVE_NAMES.get(stage, (stage, ""))
    if stage == "rl":
        return [*SIZE, "steps=8", "data.max_length=192", "batch.prompts=4", *ROLLOUT]
    if stage == "preference":
        return [*SIZE, "steps=8", "data.max_length=192", "batch.rows=4"]
    whole = [*SIZE, "steps=8", "data.max_length=192", "data.packing=none", "batch.sequences=16"]
    return whole if stage == "sft" else [*whole, "rollout.max_new_tokens=8"]


def losses() -> list[float]:
    lines = map(json.loads, Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def rises(values: list[float]) -> bool:
    """Whether a loss exceeds 1.2 times the first; of policy gradients, which begin at 0, by more than 0.05."""
    return max(values) > 1.2 * abs(values[0]) + (0.05 if abs(values[0]) < 0.1 else 0.0)


def written(values: dict[str, Any]) -> str:
    Path("recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return "recipe.yaml"


@pytest.mark.parametrize("place", RECIPES)
def test_a_documented_recipe_trains_without_a_rising_loss(place: str, here: Path) -> None:
    values = replaced(RECIPES[place])
    if any(reward.get("path") == "reward" for reward in values.get("rewards", ())):
        reward = {**values, "stage": "reward", "data": {"train": "pairs.jsonl"}, "output": "reward"}
        for key in ("rewards", "objective", "rollout"):
            reward.pop(key, None)
        assert danlu("train", written(reward), *SIZE, "steps=1", "data.max_length=192", "batch.rows=4") == 0
    recipe, size = written(values), size_of(values["stage"])
    if "group" in values.get("quantization", ""):
        size.append("quantization.group=4")  # which divides the small model's layers
    assert danlu("train", recipe, *size, "--dry-run") == 0
    assert not Path("run").exists()
    assert danlu("train", recipe, *size) == 0
    seen = losses()
    assert len(seen) == 8 and not rises(seen), seen


def test_a_rate_for_pretraining_is_seen(here: Path) -> None:
    """The one rate that every stage had before lets the loss of DPO rise, which the run says at its end."""
    values = replaced({"stage": "dpo"})
    assert danlu("train", written(values), *size_of("dpo"), "optimizer.learning_rate=2e-4", "schedule=cosine") == 0
    assert rises(losses()), losses()


def documented_stages() -> Iterator[str]:
    yield from (values["stage"] for values in RECIPES.values())


def test_blocks_are_found() -> None:
    assert {"sft", "dpo", "grpo", "distill", "online-dpo"} <= set(documented_stages()) and len(RECIPES) == 8
