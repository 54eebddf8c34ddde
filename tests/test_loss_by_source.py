"""The loss of each source of rows stands beside the loss of all: in metrics.jsonl and on TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.digits import digits_folder
from builders.process_group import run_group
from builders.tiny_world import World, danlu, write_rows
from builders.train_worker import train

from danlu.data.demo_data import conversations

pytestmark = pytest.mark.usefixtures("module_tokenises_here")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def by_source(line: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix("loss/"): value for name, value in line.items() if name.startswith("loss/")}


@pytest.fixture(scope="module")
def two(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run over two files, and their paths."""
    folder = tmp_path_factory.mktemp("two")
    files = [str(write_rows(folder / f"{name}.jsonl", list(conversations(seed, 60)))) for seed, name in enumerate("ab")]
    data = {"train": [{"path": file} for file in files], "eval": 12}
    recipe = tiny_world.recipe(folder / "run", data=data, evaluation={"every": 4}, log={"tensorboard": True})
    assert danlu("train", recipe) == 0
    return folder / "run", files


def test_every_step_says_the_loss_of_each_file(two: tuple[Path, list[str]]) -> None:
    steps = [line for line in lines(two[0]) if "grad_norm" in line]
    assert len(steps) == 12
    for step in steps:
        losses = by_source(step)
        assert losses and losses.keys() <= {"a.jsonl", "b.jsonl"}
        # The loss of all is a weighted mean of the two, so it lies between them.
        assert min(losses.values()) - 1e-6 <= step["loss"] <= max(losses.values()) + 1e-6
    assert any(len(by_source(step)) == 2 and len(set(by_source(step).values())) == 2 for step in steps)


def test_so_does_an_evaluation(two: tuple[Path, list[str]]) -> None:
    evaluation = next(line for line in lines(two[0]) if "eval_loss" in line)
    losses = {name: value for name, value in evaluation.items() if name.startswith("eval_loss/")}
    assert losses.keys() == {"eval_loss/a.jsonl", "eval_loss/b.jsonl"}
    assert min(losses.values()) <= evaluation["eval_loss"] <= max(losses.values())


def test_tensorboard_has_a_curve_for_each(two: tuple[Path, list[str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(two[0] / "tensorboard"))
    events.Reload()
    assert {"train/loss/a.jsonl", "train/loss/b.jsonl", "eval/loss/a.jsonl"} <= set(events.Tags()["scalars"])


def test_the_parts_of_a_step_are_those_of_its_rows(tiny_world: World, tmp_path: Path) -> None:
    """With both files the same, and a step that sees all of them, each has the loss of all."""
    rows = list(conversations(0, 8))
    files = [str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name in "ab"]
    data = {"train": [{"path": file} for file in files], "packing": "none"}
    recipe = tiny_world.recipe(
        tmp_path / "run", data=data, batch={"sequences": 16, "micro": 4}, steps=1, schedule={"warmup": 0}
    )
    assert danlu("train", recipe) == 0
    (step,) = [line for line in lines(tmp_path / "run") if "grad_norm" in line]
    assert by_source(step) == {name: pytest.approx(step["loss"], rel=1e-5) for name in ("a.jsonl", "b.jsonl")}


def test_rows_to_evaluate_on_have_names_of_their_own(tiny_world: World, tmp_path: Path) -> None:
    """Files of data.eval are not taken for those that are trained on; one of them alone is the loss of all."""
    for count, names in ((1, set()), (2, {"eval_loss/c.jsonl", "eval_loss/d.jsonl"})):
        files = {
            name: str(write_rows(tmp_path / f"{name}.jsonl", list(conversations(ord(name), 20)))) for name in "abcd"
        }
        data = {"train": [{"path": files[name]} for name in "ab"], "eval": [{"path": files[n]} for n in "cd"[:count]]}
        output = tmp_path / f"run{count}"
        changes = {"steps": 2, "schedule": {"warmup": 0}, "evaluation": {"every": 2}}
        assert danlu("train", tiny_world.recipe(output, data=data, **changes)) == 0
        evaluation = next(line for line in lines(output) if "eval_loss" in line)
        assert {name for name in evaluation if name.startswith("eval_loss/")} == names
        assert any(by_source(line) for line in lines(output))


def test_folders_of_images_are_told_apart(tmp_path: Path) -> None:
    folders = [str(digits_folder(tmp_path / name)) for name in ("old", "new")]
    recipe = tmp_path / "images.yaml"
    recipe.write_text(
        f"stage: classify\nmodel: {{preset: lenet5}}\ndata: {{train: [{folders[0]}, {folders[1]}]}}\nsteps: 2\n"
        f"schedule: {{warmup: 0}}\nbatch: {{sequences: 32}}\nprecision: fp32\noutput: {tmp_path / 'run'}\n"
    )
    assert danlu("train", recipe) == 0
    for step in (line for line in lines(tmp_path / "run") if "grad_norm" in line):
        losses = by_source(step)
        assert losses.keys() == {"old", "new"}
        assert min(losses.values()) - 1e-6 <= step["loss"] <= max(losses.values()) + 1e-6


@pytest.mark.distributed
def test_processes_add_up_the_losses_of_sources(tiny_world: World, tmp_path: Path) -> None:
    files = [str(write_rows(tmp_path / f"{name}.jsonl", list(conversations(ord(name), 20)))) for name in "ab"]
    data = {"train": [{"path": file} for file in files]}
    recipes = [tiny_world.recipe(tmp_path / name, data=data, steps=3) for name in ("alone", "two")]
    assert danlu("train", recipes[0]) == 0
    assert run_group(train, 2, [str(recipes[1])]) == [[(3, 0)]] * 2
    alone, two = (
        [by_source(line) for line in lines(tmp_path / name) if "grad_norm" in line] for name in ("alone", "two")
    )
    assert two == [pytest.approx(losses, rel=1e-5) for losses in alone]
    assert alone[0] != pytest.approx(alone[1], rel=1e-3)


def test_one_file_is_not_told_twice(tiny_world: World, tmp_path: Path) -> None:
    assert danlu("train", tiny_world.recipe(tmp_path / "run", steps=1, schedule={"warmup": 0})) == 0
    assert not any(by_source(line) for line in lines(tmp_path / "run"))
