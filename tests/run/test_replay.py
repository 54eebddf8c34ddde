"""`danlu replay`: a rollout made again has the same tokens, and whatever differs is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.tiny_world import World, danlu
from test_rl_runs import FILTERED, recipe_file

from danlu.core.errors import CheckpointError, RecipeError
from danlu.run.replay import Difference, first_difference, replay

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

RUN = {
    "rollout": FILTERED,
    "batch": {"prompts": 4, "micro": 1, "updates": 2, "passes": 1},
    "checkpoint": {"every": 1, "keep": 20},
    "log": {"tensorboard": False},
}
"""Eight steps, two for each rollout: those of steps 1, 3, 5 and 7."""


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tiny_world: World, tmp_path_factory: pytest.TempPathFactory, module_tokenises_here: None) -> Path:
    """A finished run with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    assert danlu("train", recipe_file(tiny_world, folder, **RUN)) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    return folder


def keep_checkpoints(run: Path, *steps: int) -> None:
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) not in steps:
            shutil.rmtree(checkpoint)


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Changes the lines of rollouts.jsonl."""
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    change(lines)
    (run / "rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def quiet(line: str) -> None:
    """What a replay says on the way is not looked at."""


@pytest.mark.parametrize(
    ("kept", "step", "first", "from_step", "rollouts"),
    [
        ((2, 4, 6), 5, 5, 4, 1),  # right before the rollout
        ((2, 4, 6), 6, 5, 4, 1),  # the rollout of the second step is that of the first
        ((3,), 8, 7, 3, 2),  # within a rollout, whose items are in the checkpoint
        ((7,), 5, 5, 0, 3),  # from the start: the only checkpoint is later
    ],
)
def test_a_rollout_made_again_has_the_same_tokens(
    run: Path, kept: tuple[int, ...], step: int, first: int, from_step: int, rollouts: int
) -> None:
    keep_checkpoints(run, *kept)
    before = files(run)
    result = replay(run, step, log=quiet)
    assert result.difference is None
    assert (result.step, result.from_step, result.rollouts) == (first, from_step, rollouts)
    assert result.answers == 16 and 16 <= result.tokens <= 16 * 6
    assert files(run) == before


def test_a_token_that_differs_is_named(run: Path) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        (line,) = (line for line in lines if line["number"] == 9)
        line["answers"][2]["tokens"][1] += 1

    keep_checkpoints(run, 3)
    rewrite(run, change)
    difference = replay(run, 5, log=quiet).difference
    assert difference is not None
    assert (difference.step, difference.number, difference.sample, difference.position) == (5, 9, 2, 1)
    assert difference.recorded is not None and difference.replayed == difference.recorded - 1
    assert replay(run, 3, log=quiet).difference is None  # control: the rollout before


def test_a_changed_reward_is_noticed_in_a_later_rollout(run: Path) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines[:4]:
            for sample, answer in enumerate(line["answers"]):
                answer["rewards"]["letters"] = 50.0 * sample

    keep_checkpoints(run)
    rewrite(run, change)
    assert replay(run, 1, log=quiet).difference is None  # made before any reward
    difference = replay(run, 7, log=quiet).difference
    assert difference is not None and 1 < difference.step <= 7


def test_the_command_prints_what_came_of_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("replay", run, "--step", "5") == 0
    said = capsys.readouterr().out
    assert said.startswith("identical: ") and "rollout of step 5" in said and "checkpoint of step 4" in said

    def change(lines: list[dict[str, Any]]) -> None:
        lines[8]["answers"][0]["tokens"].append(7)

    rewrite(run, change)
    assert danlu("replay", run, "--step", "5") == 1
    assert "different: rollout of step 5, prompt 8 (" in (said := capsys.readouterr().out)
    assert "7 recorded, no token now" in said


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"tensor": 2, "sequence": True}, {"data": 2, "shard": "zero3"}])
def test_a_run_of_several_processes_is_replayed_in_one(run: Path, layout: dict[str, Any]) -> None:
    recipe = run / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"parallel": layout}))
    said: list[str] = []
    replayed = replay(run, 5, log=said.append)
    assert replayed.difference is None and replayed.from_step == 4  # this one had one process
    assert any("replayed in one process" in line for line in said)


def test_what_cannot_be_replayed_is_refused_with_the_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("replay", run, "--step", "9") != 0
    assert "no whole rollout of step 9" in capsys.readouterr().err
    keep_checkpoints(run)
    lines = (run / "rollouts.jsonl").read_text()
    (run / "rollouts.jsonl").write_text('{"step": 1}\n' + lines)
    with pytest.raises(CheckpointError, match=r"rollouts\.jsonl:1: not a line"):
        replay(run, 5, log=quiet)
    (run / "rollouts.jsonl").write_text(lines)
    rewrite(run, lambda lines: lines.pop(0))
    with pytest.raises(CheckpointError, match=r"no whole rollout of step 1, which has to be repeated .*keep_every"):
        replay(run, 5, log=quiet)


def test_a_run_that_went_back_is_refused_unless_a_checkpoint_lies_after_it(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "event": "rewind", "back_to": 2}) + "\n")
    assert replay(run, 5, log=quiet).difference is None  # from step 4
    keep_checkpoints(run, 1)
    with pytest.raises(CheckpointError, match="went back from step 4 to step 2"):
        replay(run, 5, log=quiet)


def test_runs_of_other_stages_have_no_rollouts(tiny_world: World, tmp_path: Path) -> None:
    assert danlu("train", tiny_world.recipe(tmp_path / "sft", steps=2)) == 0
    with pytest.raises(RecipeError, match="stage sft, which has no rollouts"):
        replay(tmp_path / "sft", 1, log=quiet)


def test_another_environment_is_told(run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    environment["packages"]["torch"] = "0.1"
    (run / "environment.json").write_text(json.dumps(environment))
    said: list[str] = []
    replay(run, 1, log=said.append)
    assert any("tokens may differ where nothing is wrong: packages.torch: '0.1'" in line for line in said)
    assert not any("processes trained" in line for line in said)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "peak": {**summary["peak"], "processes": 2}}))
    replay(run, 1, log=said.append)
    assert any("2 processes trained, and one replays" in line for line in said)


def test_prompts_that_were_replaced_are_replaced_again(tiny_world: World, tmp_path: Path) -> None:
    """Dynamic sampling with a reward that many prompts have no signal of: replaced prompts are not recorded."""
    (tiny_world.folder / "rare.py").write_text("def rare(completion, **row):\n    return float('x' in completion)\n")
    rewards = {"rewards": [f"{tiny_world.folder}/rare.py:rare"], "objective": {"kind": "grpo", "resample": 3}}
    file = recipe_file(tiny_world, tmp_path / "run", **{**RUN, **rewards})
    assert danlu("train", file) == 0
    keep_checkpoints(tmp_path / "run")
    numbers = [json.loads(line)["number"] for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    assert max(numbers) > len(numbers)  # control: some were replaced
    assert replay(tmp_path / "run", 7, log=quiet).difference is None


def test_rewards_of_greedy_answers_are_recorded_for_it(tiny_world: World, tmp_path: Path) -> None:
    more = {**RUN, "objective": {"kind": "grpo", "baseline": "greedy"}, "steps": 4}
    assert danlu("train", recipe_file(tiny_world, tmp_path / "run", **more)) == 0
    keep_checkpoints(tmp_path / "run")
    assert replay(tmp_path / "run", 3, log=quiet).difference is None

    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines[:4]:
            line["greedy_rewards"]["letters"] += 50.0

    rewrite(tmp_path / "run", change)
    assert replay(tmp_path / "run", 3, log=quiet).difference is not None


def line(tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"step": 1, "number": 3, "row": "p:1", "answers": [{"tokens": [1]}, {"tokens": tokens}], **more}


@pytest.mark.parametrize(
    ("tokens", "position", "recorded", "replayed"),
    [([5, 6, 7], 2, 8, 7), ([5, 6], 2, 8, None), ([5, 6, 8, 9], 3, None, 9), ([], 0, 5, None)],
)
def test_the_first_difference(tokens: list[int], position: int, recorded: int | None, replayed: int | None) -> None:
    expected = Difference(1, 3, "p:1", 1, position, recorded, replayed)
    assert first_difference([line([5, 6, 8])], [line(tokens)]) == expected
    assert first_difference([line([5, 6, 8])], [line([5, 6, 8])]) is None


def test_other_prompts_are_no_difference_of_tokens() -> None:
    with pytest.raises(CheckpointError, match="rows of data.train have changed"):
        first_difference([line([1])], [line([1], row="p:2")])
