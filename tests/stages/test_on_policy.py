"""Stage distill with `on_policy` as whole runs: it trains what offline distillation on the same answers does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.distillation_worker import recipe, teacher_folder, train
from builders.pair_stage import trained_tensors
from builders.process_group import run_group
from builders.tiny_world import World, metrics, write_rows
from builders.worst_errors import worst_relative_error

from danlu.core.types import Pack, Sample
from danlu.rl.on_policy_rows import OnPolicyRows

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

CLOSE = 1e-6  # relative, in the 2-norm of each tensor: the rows of the other run are added up in another order
GKD: dict[str, Any] = {
    "on_policy": True,
    "objective": {"kind": "jensen-shannon", "beta": 0.3, "temperature": 1.5},
    "rollout": {"max_new_tokens": 8, "temperature": 0.8, "top_p": 0.95},
}
SUMS = ("loss", "divergence", "grad_norm", "on_policy", "length", "eval_loss")


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[float]:
    return [value for line in metrics(folder) for name, value in line.items() if name in SUMS]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """The items of each step with own answers that is drawn, in their order."""
    items: list[Sample] = []
    real = OnPolicyRows._with_answers

    def recorded(*arguments: Any) -> list[Pack]:
        made = real(*arguments)
        items.extend(item.samples[0] for item in made)
        return made

    monkeypatch.setattr(OnPolicyRows, "_with_answers", recorded)
    return items


def as_rows(items: list[Sample]) -> list[dict[str, Any]]:
    """The items as rows of tokens, of which those without weight are not trained."""
    ids = [item.tokens.tolist() for item in items]
    labels = [np.where(item.weights > 0, item.tokens, -100).tolist() for item in items]
    return [{"input_ids": tokens, "labels": targets} for tokens, targets in zip(ids, labels, strict=True)]


@pytest.mark.parametrize("teachers", [1, 2])
def test_a_step_is_one_of_offline_distillation_on_the_answers_that_were_drawn(
    tiny_world: World, tmp_path: Path, drawn: list[Sample], teachers: int
) -> None:
    second = {"model": teacher_folder(tiny_world, "second-teacher", seed=8, hidden_size=32), "top_k": 20, "weight": 0.5}
    shared = {**GKD, "teacher": [teacher_folder(tiny_world), second][:teachers], "steps": 1, "evaluation": {}}
    shared |= {"data": {"eval": None}, "schedule": {"kind": "constant", "warmup": 0}}
    shared |= {"optimizer": {"kind": "sgd", "learning_rate": 1.0}, "gradient_clipping": None}
    assert train([recipe(tiny_world, tmp_path / "own", **shared)]) == [0]
    answers = [line["answers"][0]["tokens"] for line in rollouts(tmp_path / "own")]
    assert [item.tokens.tolist()[-len(own) :] for item, own in zip(drawn, answers, strict=True)] == answers
    rows = as_rows(drawn)
    offline: dict[str, Any] = {**shared, "on_policy": None, "rollout": None}
    for name, given in {"offline": rows, "others": rows[:5] + rows[:1]}.items():
        write_rows(tmp_path / f"{name}.jsonl", given)
        data = {"train": str(tmp_path / f"{name}.jsonl"), "packing": False, "eval": None}
        assert train([recipe(tiny_world, tmp_path / name, **{**offline, "data": data})]) == [0]
    own, same = metrics(tmp_path / "own")[0], metrics(tmp_path / "offline")[0]
    for name in ("loss", "grad_norm", "tokens", "trained_tokens"):
        assert own[name] == pytest.approx(same[name], rel=1e-6), name
    weights = trained_tensors(tmp_path / "own")
    assert worst_relative_error(weights, trained_tensors(tmp_path / "offline")) < CLOSE
    # Control: with one answer in the place of another the step is another.
    assert worst_relative_error(weights, trained_tensors(tmp_path / "others")) > 100 * CLOSE


def test_the_policy_learns_from_its_own_answers_and_is_judged_by_rows(tiny_world: World, tmp_path: Path) -> None:
    runs = {"own": {**GKD, "on_policy": 0.5}, "none": {**GKD, "on_policy": 0.0, "rollout": None}}
    for name, changes in runs.items():
        more = {"steps": 30, "evaluation": {"every": 30}, "data": {"eval": 5, "packing": False}}
        assert train([recipe(tiny_world, tmp_path / name, **changes, **more)]) == [0]
    lines = metrics(tmp_path / "own")
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["divergence"] < 0.97 * steps[0]["divergence"]
    assert 0.3 < sum(line["on_policy"] for line in steps) / len(steps) < 0.7
    held_out = [next(line for line in metrics(tmp_path / name) if "eval_loss" in line) for name in runs]
    assert held_out[0]["eval_tokens"] == held_out[1]["eval_tokens"]  # rows, whatever is trained on
    assert not (tmp_path / "none" / "rollouts.jsonl").exists()


def test_it_goes_on_where_it_stopped(tiny_world: World, tmp_path: Path) -> None:
    changes = {**GKD, "on_policy": 0.5, "numerics": "exact"}
    assert train([recipe(tiny_world, tmp_path / "whole", **changes)]) == [0]
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(max((tmp_path / "again" / "checkpoints").glob("step-*")))
    shutil.rmtree(tmp_path / "again" / "model")
    assert train([recipe(tiny_world, tmp_path / "again", **changes)]) == [0]
    one, other = trained_tensors(tmp_path / "whole"), trained_tensors(tmp_path / "again")
    assert [name for name, tensor in one.items() if not tensor.equal(other[name])] == []
    assert rollouts(tmp_path / "whole") == rollouts(tmp_path / "again")
    assert train([recipe(tiny_world, tmp_path / "seed", **changes, seed=1)]) == [0]
    assert rollouts(tmp_path / "seed") != rollouts(tmp_path / "whole")  # control


@pytest.mark.distributed
def test_every_layout_draws_and_trains_what_one_process_does(tiny_world: World, tmp_path: Path) -> None:
    changes = {**GKD, "on_policy": 0.5}
    assert train([recipe(tiny_world, tmp_path / "one", **changes)]) == [0]
    layouts: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {"shard": "zero3"}}
    layouts |= {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    files = [recipe(tiny_world, tmp_path / name, layout, **changes) for name, layout in layouts.items()]
    assert run_group(train, 2, files) == [[0] * len(files)] * 2
    for name in layouts:
        assert rollouts(tmp_path / name) == rollouts(tmp_path / "one"), name
        assert numbers(tmp_path / name) == pytest.approx(numbers(tmp_path / "one"), rel=1e-4), name
    assert numbers(tmp_path / "one")[0] != pytest.approx(numbers(tmp_path / "one")[5], rel=1e-4)  # control


@pytest.mark.parametrize(
    "changes", [{"adapter": "lora", "quantization": "nf4"}, {"precision": "bf16", "objective": "reverse"}]
)
def test_adapters_and_bf16_learn_from_own_answers(tiny_world: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    more = {"model": str(tiny_world.base)} if "adapter" in changes else {}
    assert train([recipe(tiny_world, tmp_path / "run", **{**GKD, **changes, **more})]) == [0]
    steps = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert all(line["on_policy"] == 1 for line in steps) and len(rollouts(tmp_path / "run")) == 24
