"""Reinforcement learning as whole runs: it learns, resumes within a rollout, and is the same in every layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.process_group import run_group
from builders.tiny_world import World, danlu, metrics, write_rows
from builders.train_worker import train
from safetensors.torch import load_file

from danlu.core.errors import DanluError
from danlu.models.packed_weights import PackedWeights
from danlu.recipe import Recipe
from danlu.stages.builder import DecoderBuilder
from danlu.stages.roles import FrozenDecoder
from danlu.training.metrics import TIMING_FIELDS

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

ROWS = [{"question": f"{number % 7} and {number % 5}", "answer": str(number % 7)} for number in range(24)]


def changes(world: World, **more: Any) -> dict[str, Any]:
    """A recipe of stage rl over a tiny model: more than one e in an answer is what it is rewarded for."""
    rows = world.folder / "prompts.jsonl"
    if not rows.exists():
        write_rows(rows, ROWS)
    reward = world.folder / "letters.py"
    if not reward.exists():
        reward.write_text("def letters(completion, **row):\n    return float(completion.count('e'))\n")
    recipe: dict[str, Any] = {
        "stage": "grpo",
        "model": {"path": str(world.base)},
        "data": {"train": str(rows), "prompt": "{question}", "eval": 4},
        "rollout": {"samples": 4, "max_new_tokens": 6},
        "rewards": [f"{reward}:letters"],
        "batch": {"prompts": 4, "micro": 1},
        "evaluation": {"every": 4},
        "steps": 8,
    }
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(recipe.get(name), dict)
        recipe[name] = {**recipe[name], **value} if both else value
    return recipe


def recipe_file(world: World, folder: Path, **more: Any) -> Path:
    """The file of `changes` over the recipe of the world, whose model and batch they take the place of."""
    own = changes(world, **more)
    values = {**world.values(folder, **own), "model": own["model"], "batch": own["batch"]}
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(yaml.safe_dump(values))
    return file


def run(world: World, folder: Path, **more: Any) -> list[dict[str, Any]]:
    assert danlu("train", recipe_file(world, folder, **more)) == 0
    return steps(folder)


def run_layouts(world: World, folder: Path, layouts: Mapping[str, tuple[int, dict[str, Any]]], **more: Any) -> None:
    """One process trains in folder/one, and each layout, of so many processes, in the folder of its name."""
    ended = (len(run(world, folder / "one", **more)), 0)
    for size in sorted({count for count, _ in layouts.values()}):
        files = [
            str(recipe_file(world, folder / name, **more, parallel=parallel))
            for name, (count, parallel) in layouts.items()
            if count == size
        ]
        assert run_group(train, size, files, timeout=900) == [[ended] * len(files)] * size


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "loss" in line]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMING_FIELDS} for line in lines]


def go_back(folder: Path, step: int, result: str = "model") -> None:
    """Leaves of a finished run what was there after a step. result: the folder of what it made."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / result)
    (folder / "summary.json").unlink()


def assert_goes_on(
    world: World, whole: Path, after: int, *, result: str = "model/model.safetensors", **more: Any
) -> None:
    """A run that finished in `whole`, set back to a step, goes on to the same lines, weights and rollouts."""
    again = whole.with_name("again")
    shutil.copytree(whole, again)
    go_back(again, after, Path(result).parts[0])
    resolved = (again / "recipe.yaml").read_text().replace(str(whole), str(again))
    (again / "recipe.yaml").write_text(resolved)
    assert without_times(run(world, again, **more)) == without_times(steps(whole))
    one, other = (load_file(folder / result) for folder in (whole, again))
    assert all(one[name].equal(other[name]) for name in one)
    assert (whole / "rollouts.jsonl").read_text() == (again / "rollouts.jsonl").read_text()


def test_a_policy_learns_what_it_is_rewarded_for(tiny_world: World, tmp_path: Path) -> None:
    lines = run(tiny_world, tmp_path / "run", steps=24, rollout={"samples": 8})
    assert all(line["ratio"] == 1 for line in lines)  # each rollout is trained on once
    assert {"no_signal", "gap", "length", "truncated", "entropy"} <= lines[0].keys()
    held_out = [line["eval_reward"] for line in metrics(tmp_path / "run") if "eval_reward" in line]
    assert len(held_out) == 6 and held_out[-1] > held_out[0] + 3  # of greedy answers with at most 6 letters
    answered = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [line["number"] for line in answered] == list(range(24 * 4))
    for line in answered[:8]:
        for answer in line["answers"]:
            assert answer["rewards"] == {"letters": float(answer["text"].count("e"))}


def test_rewards_that_teach_nothing_and_answers_without_an_end_are_told(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_world.folder / "same.py").write_text("def same(completion, **row):\n    return 0.5\n")
    lines = run(tiny_world, tmp_path / "run", steps=6, rewards=[f"{tiny_world.folder}/same.py:same"])
    assert all(line["no_signal"] == 1 and line["truncated"] == 1 for line in lines)
    told = capsys.readouterr().err
    for remark in ("all answers to a prompt have had the same reward in", "all answers have been cut off at"):
        assert told.count(f"step 5: {remark}") == told.count(remark) == 1
    run(tiny_world, tmp_path / "other", steps=6)
    assert "the same reward" not in capsys.readouterr().err  # control


@pytest.mark.parametrize(
    ("code", "more", "message"),
    [
        (
            "def letters(completion): ...\nraise OSError('no such unit')",
            {"rewards": ["@:letters"]},
            " rewards: @: the file raises OSError: no such unit (mine.py:2)",
        ),
        (
            "class Maze:\n    def __init__(self, size): ...",
            {"rewards": None, "environment": {"kind": "python", "path": "@:Maze"}},
            " environment.arguments: Maze: missing a required argument: 'size'",
        ),
        (
            "def solve(maze, base_url): ...",
            {"rewards": None, "environment": {"kind": "agent", "path": "@:solve"}},
            " environment: solve: missing a required argument: 'maze'",
        ),
    ],
)
def test_code_that_cannot_be_loaded_is_told_before_models_are(
    tiny_world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    more: dict[str, Any],
    message: str,
) -> None:
    def place(*arguments: Any) -> None:
        raise DanluError("the models are placed")

    monkeypatch.setattr(DecoderBuilder, "_policy", place)
    file = tmp_path / "mine.py"
    text = json.dumps(more).replace("@", str(file))

    def said(code: str) -> str:
        file.write_text(f"{code}\n")
        assert danlu("train", recipe_file(tiny_world, tmp_path / "run", **json.loads(text))) != 0
        return capsys.readouterr().err

    assert message.replace("@", str(file)) in said(code)
    good = "def letters(completion): ...\nclass Maze: ...\ndef solve(row, base_url): ..."
    assert "error: the models are placed" in said(good)  # control


def test_a_checkpoint_is_not_taken_up_with_other_prompts(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, data = write_rows(tmp_path / "rows.jsonl", ROWS), {"train": str(tmp_path / "rows.jsonl")}
    batch, folder = {"prompts": 4, "micro": 1, "updates": 2}, tmp_path / "run"
    file = recipe_file(tiny_world, folder, steps=4, data=data, batch=batch, checkpoint={"every": 1, "keep": 9})
    assert danlu("train", file) == 0
    go_back(folder, 3)  # in the middle of a rollout
    write_rows(rows, [*ROWS[:-1], {"question": "6 and 6", "answer": "6"}])
    assert danlu("train", file) == 5
    assert "the prompts are not what the checkpoint was made with" in capsys.readouterr().err
    write_rows(rows, ROWS)
    assert danlu("train", file) == 0 and len(steps(folder)) == 4  # control


FILTERED = {"samples": 4, "max_new_tokens": 6, "temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize(
    ("precision", "adapter"),
    [
        ("bf16", None),
        ("fp32", {"kind": "lora", "rank": 4, "targets": "all-linear"}),
        ({"kind": "fp8", "activations": "fp32"}, None),
    ],
)
def test_exact_numerics_leave_no_gap(tiny_world: World, tmp_path: Path, precision: Any, adapter: Any) -> None:
    more = {"batch": {"prompts": 4, "micro": 1, "updates": 2}, "numerics": "exact", "precision": precision, "steps": 4}
    lines = run(tiny_world, tmp_path / "exact", rollout=FILTERED, **more, **({"adapter": adapter} if adapter else {}))
    fresh = lines[0::2]
    assert [line["gap"] for line in fresh] == [0.0, 0.0]
    assert [line["ratio"] for line in fresh] == [1.0, 1.0] and [line["clip"] for line in fresh] == [0.0, 0.0]
    assert all(line["ratio"] != 1 for line in lines[1::2])  # control: the second update is off its rollout


@pytest.mark.parametrize("recorded", [True, False], ids=["", "control"])
def test_under_longrope_answers_are_trained_as_they_were_rotated(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """By prompt plus max_new_tokens, which passes the original length where the answers themselves do not."""
    base = tmp_path / "base"
    shutil.copytree(tiny_world.base, base)
    config = json.loads((base / "config.json").read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 8.0]}
    scaling = {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 30, **factors}
    config["rope_scaling"] = scaling
    (base / "config.json").write_text(json.dumps(config))
    if not recorded:
        monkeypatch.setattr("danlu.stages.roles.ROTARY_LENGTH", "no such fact")
    more = {"model": {"path": str(base)}, "batch": {"prompts": 4, "micro": 2}, "numerics": "exact", "steps": 3}
    rollout = {**FILTERED, "max_new_tokens": 12, "stop_strings": list("aeinost ")}  # of prompts of 20 tokens
    lines = run(tiny_world, tmp_path / "run", rollout=rollout, **more)
    gaps = [line["gap"] for line in lines]
    assert any(line["length"] < 10 for line in lines)
    assert gaps == [0.0] * 3 if recorded else max(gaps) > 1e-4


def test_fast_numerics_ratios_are_one_in_the_first_update(tiny_world: World, tmp_path: Path) -> None:
    batch = {"prompts": 4, "micro": 1, "updates": 2, "passes": 2}
    lines = run(tiny_world, tmp_path / "fast", rollout=FILTERED, batch=batch, precision="bf16")
    assert [line["ratio"] for line in lines[0::4]] == [1.0, 1.0]
    assert [line["approx_kl"] for line in lines[0::4]] == [0.0, 0.0]
    assert any(line["rollout_gap_max"] > 0 for line in lines)  # control: the engine rounds otherwise


@pytest.mark.parametrize("drops_out", [False, True], ids=["", "control"])
def test_ratios_are_one_with_an_adapter_that_has_dropout(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops_out: bool
) -> None:
    """The policy that drew had none, and the policy that is compared with it has none either."""
    monkeypatch.setattr(Recipe, "drops_out", drops_out)
    adapter = {"kind": "lora", "rank": 4, "dropout": 0.5, "init": "pissa"}  # whose product is not 0 at the start
    more = {"adapter": adapter, "batch": {"prompts": 4, "micro": 2, "updates": 2}, "numerics": "exact", "steps": 2}
    line, _ = run(tiny_world, tmp_path / "run", **more)
    assert ((line["ratio"], line["gap"]) == (1.0, 0.0)) == (not drops_out)


@pytest.mark.parametrize("drops_copies", [True, False], ids=["", "control"])
def test_rollouts_in_bf16_follow_the_weights_as_they_are_trained(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops_copies: bool
) -> None:
    """The engine multiplies with bfloat16 copies of the float32 weights, which must not outlive an update of these."""
    if not drops_copies:
        monkeypatch.setattr(PackedWeights, "clear_trained", lambda packed_weights: None)
    gaps = [line["gap"] for line in run(tiny_world, tmp_path / "run", precision="bf16", schedule="constant", steps=5)]
    assert all(0 < gap < 0.03 for gap in gaps) if drops_copies else gaps[0] < 0.03 and gaps[4] > 0.06, gaps


@pytest.mark.parametrize("after", [3, 4])
def test_a_run_stopped_in_a_rollout_goes_on_as_if_it_had_not_been(
    tiny_world: World, tmp_path: Path, after: int
) -> None:
    more = {"batch": {"prompts": 4, "micro": 1, "updates": 2, "passes": 2}, "checkpoint": {"every": 1, "keep": 20}}
    more |= {"rollout": FILTERED, "numerics": "exact"}
    run(tiny_world, tmp_path / "whole", **more)
    assert_goes_on(tiny_world, tmp_path / "whole", after, **more)


LAYOUTS = {
    "ddp": (2, {}),
    "zero3": (2, {"shard": "zero3"}),
    "tensor": (2, {"tensor": 2, "sequence": True}),
    "zero2+tensor": (4, {"shard": "zero2", "tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "tensor+pipeline": (4, {"tensor": 2, "pipeline": {"stages": 2, "schedule": "gpipe"}}),
    "zero3+pipeline": (4, {"shard": "zero3", "pipeline": {"stages": 2, "schedule": "zb-h1"}}),
}


@pytest.fixture(scope="module")
def layouts(tiny_world: World, tmp_path_factory: pytest.TempPathFactory, module_tokenises_here: None) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    run_layouts(tiny_world, folder, LAYOUTS, batch={"prompts": 4, "micro": 1, "updates": 2}, steps=4)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(layouts: Path, layout: str) -> None:
    one = steps(layouts / "one")
    for line, other in zip(one, steps(layouts / layout), strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy"):
            assert other[name] == pytest.approx(line[name], rel=2e-4, abs=2e-6), name
    assert one[1]["loss"] != pytest.approx(one[3]["loss"], rel=2e-4)  # control
    read = [(layouts / name / "rollouts.jsonl").read_text() for name in ("one", layout)]
    assert read[0] == read[1]


PPO = {
    "stage": "ppo",
    "objective": {"kl": {"in": "reward", "estimator": "k1", "coefficient": 0.05, "target": 6.0}},
    "batch": {"prompts": 4, "micro": 1, "updates": 2, "passes": 2},
}


def test_ppo_trains_a_critic_beside_the_policy(tiny_world: World, tmp_path: Path) -> None:
    lines = run(tiny_world, tmp_path / "ppo", steps=24, value={"rate_ratio": 4.0}, **PPO)
    assert {"value_loss", "explained_variance", "kl_in_reward", "kl_coefficient"} <= lines[0].keys()
    assert [line["ratio"] for line in lines[0::4]] == [1.0] * 6
    assert lines[0]["kl_in_reward"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["value"] > lines[0]["value"] + 0.05  # rewards rise, and the critic has seen it
    held_out = [line["eval_reward"] for line in metrics(tmp_path / "ppo") if "eval_reward" in line]
    assert held_out[-1] > held_out[0]
    written = load_file(tmp_path / "ppo" / "model" / "model.safetensors")
    assert "score.weight" not in written and "lm_head.weight" in written


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_reference_is_asked_where_its_kl_counts(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    asked: list[int] = []
    original = FrozenDecoder.__call__

    def counted(self: Any, batch: Any, *more: Any) -> Any:
        asked.append(len(batch.targets))
        return original(self, batch, *more)

    monkeypatch.setattr(FrozenDecoder, "__call__", counted)
    objective = {"kl": {"in": place, "coefficient": 0.1}}
    batch = {"prompts": 4, "micro": 1, "updates": 2, "passes": 2}
    lines = run(tiny_world, tmp_path / "run", steps=4, objective=objective, batch=batch)
    if place == "loss":  # of each step, and not of the evaluation at the end
        assert len(asked) == 4 * 2 and lines[0]["kl/k3"] == pytest.approx(0, abs=1e-6) and lines[3]["kl/k3"] > 0
    else:  # of the rollout, once for each of its trees
        assert len(asked) == 4 and lines[0]["kl_in_reward"] == pytest.approx(0, abs=1e-5)


PPO_LAYOUTS = {name: LAYOUTS[name] for name in ("ddp", "zero3", "context", "pipeline")}


@pytest.fixture(scope="module")
def ppo_layouts(tiny_world: World, tmp_path_factory: pytest.TempPathFactory, module_tokenises_here: None) -> Path:
    folder = tmp_path_factory.mktemp("ppo-layouts")
    run_layouts(tiny_world, folder, PPO_LAYOUTS, steps=4, **PPO)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("layout", PPO_LAYOUTS)
def test_ppo_learns_the_same_in_every_layout(ppo_layouts: Path, layout: str) -> None:
    for line, other in zip(steps(ppo_layouts / "one"), steps(ppo_layouts / layout), strict=True):
        for name in ("loss", "grad_norm", "value_loss", "reward", "kl_in_reward"):
            assert other[name] == pytest.approx(line[name], rel=5e-4, abs=5e-6), name
