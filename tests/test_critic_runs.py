"""PPO with a model of values of its own: an adapter on the policy's base, or a decoder, as whole runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World
from safetensors.torch import load_file
from test_rl_runs import run, without_times
from torch import Tensor

LORA = {"kind": "lora", "rank": 4, "dropout": 0.1}
CRITICS: dict[str, dict[str, Any]] = {
    "base": {"adapter": LORA, "value": {"share": "base", "adapter": {**LORA, "rank": 2}}},
    "none": {"value": {"share": "none"}},
}
PPO = {
    "stage": "ppo",
    "data": {"eval": None},
    "evaluation": {"every": None},
    "checkpoint": {"every": 1, "keep": 20},
}


def ppo(critic: str, **value: Any) -> dict[str, Any]:
    more = {**PPO, **CRITICS[critic], "batch": {"prompts": 4, "micro": 2, "updates": 2}, "steps": 4}
    return {**more, "value": {**CRITICS[critic]["value"], **value}}


def checkpoint(folder: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the policy's tensors, those of values) of a step."""
    (found,) = (folder / "checkpoints").glob(f"step-*{step}")
    tensors: dict[str, Tensor] = {}
    for file in found.glob("model*.safetensors"):
        tensors |= load_file(file)
    values = {name for name in tensors if "value" in name.split(".") or name.startswith("objective.")}
    return (
        {name: tensor for name, tensor in tensors.items() if name not in values},
        {name: tensors[name] for name in values},
    )


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    assert before.keys() == after.keys() and before
    return any(not tensor.equal(after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("critic", CRITICS)
def test_the_policy_is_held_while_values_warm_up_and_norms_are_apart(
    tiny_world: World, tmp_path: Path, critic: str
) -> None:
    lines = run(tiny_world, tmp_path / "run", **ppo(critic, warmup=2, learning_rate=1e-2), gradient_clipping=0.1)
    (policy_1, values_1), (policy_2, values_2), (policy_3, values_3) = (
        checkpoint(tmp_path / "run", step) for step in (1, 2, 3)
    )
    assert not moved(policy_1, policy_2) and moved(values_1, values_2)
    assert moved(policy_2, policy_3) and moved(values_2, values_3)  # control: it is held no longer
    assert [line["ratio"] for line in lines[:3]] == [1.0, 1.0, 1.0] and lines[3]["ratio"] != 1
    assert all("grad_norm/policy" not in line and "grad_norm/value" in line for line in lines[:2])
    for line in lines[2:]:
        both = line["grad_norm/policy"] ** 2 + line["grad_norm/value"] ** 2
        assert line["grad_norm"] ** 2 == pytest.approx(both)
    assert lines[1]["value"] != lines[0]["value"]


@pytest.mark.parametrize("critic", CRITICS)
def test_a_run_stopped_in_the_warm_up_goes_on_to_the_same_bits(tiny_world: World, tmp_path: Path, critic: str) -> None:
    more = ppo(critic, warmup=2, learning_rate=1e-2)
    whole, again = tmp_path / "whole", tmp_path / "again"
    lines = run(tiny_world, whole, **more)
    shutil.copytree(whole, again)
    for folder in (again / "checkpoints").iterdir():
        if folder.name.startswith("step-") and int(folder.name[5:]) > 1:
            shutil.rmtree(folder)
    for result in ("model", "adapter"):
        shutil.rmtree(again / result, ignore_errors=True)
    (again / "summary.json").unlink()
    (again / "recipe.yaml").write_text((again / "recipe.yaml").read_text().replace(str(whole), str(again)))
    assert without_times(run(tiny_world, again, **more)) == without_times(lines)
    for one, other in zip(checkpoint(whole, 4), checkpoint(again, 4), strict=True):
        assert not moved(one, other)
    assert moved(checkpoint(whole, 3)[1], checkpoint(whole, 4)[1])  # control
