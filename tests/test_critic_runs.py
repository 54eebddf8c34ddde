"""PPO with a model of values of its own: an adapter on the policy's base, or a decoder, as whole runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import CONFIG, World, danlu
from safetensors.torch import load_file
from test_rl_runs import recipe_file, run, without_times
from torch import Tensor

from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save
from danlu.models.score_head import new_score_head

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

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


KEPT: dict[str, dict[str, Any]] = {
    **CRITICS,
    "policy": {"value": {"share": "policy"}},
    "policy, lora": {"adapter": LORA, "value": {"share": "policy"}},
    "none, lora": {"adapter": LORA, "value": {"share": "none"}},
}
ONE_STEP: dict[str, Any] = {**PPO, "steps": 1, "schedule": {"kind": "constant", "warmup": 0}}


@pytest.mark.parametrize(
    "critic", [name if name == "none, lora" else pytest.param(name, marks=pytest.mark.slow) for name in KEPT]
)
def test_ppo_goes_on_from_a_finished_run_with_its_model_of_values(
    tiny_world: World, tmp_path: Path, critic: str
) -> None:
    own = KEPT[critic]
    value = {**own["value"], "learning_rate": 1e-2}
    run(tiny_world, tmp_path / "run", **{**ONE_STEP, **own, "value": {**value, "save": True}})
    result = "adapter" if "adapter" in own else "model"
    saved = tmp_path / "run" / f"{result}-value"
    more: dict[str, Any] = {**ONE_STEP, "model": {"path": str(tmp_path / "run" / "model")}}
    if "adapter" in own:
        more["model"] = {"path": str(tiny_world.base), "adapters": [str(tmp_path / "run" / "adapter")]}
        more["adapter"] = "continue"
    more["optimizer"] = {"kind": "adamw", "learning_rate": 0.0}  # the second run ends as it begins
    share = own["value"]["share"]
    run(tiny_world, tmp_path / "again", **more, value={"share": share, "model": str(saved)})
    (_, values), (_, again) = checkpoint(tmp_path / "run", 1), checkpoint(tmp_path / "again", 1)
    assert not moved(values, again)
    run(tiny_world, tmp_path / "anew", **more, value={"share": share})  # control
    assert any(
        name not in values or not tensor.equal(values[name])
        for name, tensor in checkpoint(tmp_path / "anew", 1)[1].items()
    )
    assert danlu("checkpoint", "export", tmp_path / "run", tmp_path / "out") == 0
    for exported, written in ((tmp_path / "out-value", saved), (tmp_path / "out", tmp_path / "run" / result)):
        for file in written.glob("*.safetensors"):
            assert (exported / file.name).read_bytes() == file.read_bytes(), file


def test_a_saved_model_of_values_is_one_that_transformers_scores_with(tiny_world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    run(tiny_world, tmp_path / "run", **{**ONE_STEP, "value": {"share": "none", "save": True}})
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model-value")
    _, values = checkpoint(tmp_path / "run", 1)
    theirs = model.state_dict()
    assert theirs["score.weight"].equal(values["objective.score.weight"]) and theirs["score.weight"].shape == (1, 32)
    ours = values["value.layers.0.mlp.down_proj.weight"]
    assert theirs["model.layers.0.mlp.down_proj.weight"].equal(ours)
    assert not theirs["model.layers.1.mlp.down_proj.weight"].equal(ours)  # control


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("base", "has no score head, and with share: policy nothing else"),
        ("wide", "hidden states of width 48, and the policy's are of width 32"),
    ],
)
def test_a_head_that_the_policy_cannot_have_is_refused(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, message: str
) -> None:
    folder = str(tiny_world.base)
    if path == "wide":
        wide = build(read_config_values({**CONFIG, "hidden_size": 48, "vocab_size": 400}))
        initialize(wide, 0)
        folder = str(tmp_path / "wide")
        config = replace(wide.config, task="sequence-classification")
        head = new_score_head(48, 1, bias=False, seed=0)
        save(wide, folder, config=config, tokenizer_from=tiny_world.tokenizer, score_head=head)
    file = recipe_file(tiny_world, tmp_path / "run", **{**ONE_STEP, "value": {"share": "policy", "model": folder}})
    assert danlu("train", file) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("share", ["policy", "none"])
def test_values_that_no_class_of_transformers_would_load_are_not_saved(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], share: str
) -> None:
    granite = build(read_config_values({**CONFIG, "model_type": "granite", "vocab_size": 400}))
    initialize(granite, 0)
    save(granite, tmp_path / "granite", tokenizer_from=tiny_world.tokenizer)
    more = {**ONE_STEP, "model": {"path": str(tmp_path / "granite")}}
    file = recipe_file(tiny_world, tmp_path / "run", **{**more, "value": {"share": share, "save": True}})
    assert danlu("train", file) != 0
    assert "value.save: transformers has no class for sequence-classification with a granite" in capsys.readouterr().err
    file = recipe_file(tiny_world, tmp_path / "run", **{**more, "value": {"share": share}})  # control
    assert danlu("train", file) == 0
