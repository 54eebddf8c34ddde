"""The models of each stage by role, without torch and without folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from danlu.recipe import Recipe, load
from danlu.recipe.roles import (
    CachedModel,
    Mixing,
    ModelSpec,
    PolicyWithoutAdapter,
    RewardModel,
    RoleModel,
    TrainedModel,
    ValueAdapter,
    ValueHead,
    roles_of,
    task_of,
)
from danlu.recipe.sections import Lora, Model, Nf4

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BASE = Model(path="base-model")
ALIKE = CachedModel(ModelSpec("reference", BASE))
BESIDE: Mapping[str, Mapping[str, RoleModel]] = {
    "distill": {"teacher": ModelSpec("teacher.0", Model(path="teacher-model"))},
    "dpo": {"reference": ALIKE},
    "gkd": {"teacher": ModelSpec("teacher.0", Model(path="teacher-model"))},
    "grpo": {},
    "kto": {"reference": ALIKE},
    "lenet_mnist": {},
    "lora": {},
    "orpo": {},
    "ppo": {
        "value": ValueHead(),
        "reference": ModelSpec("reference", BASE),
        "rewards.0": RewardModel("runs/reward"),
    },
    "pretrain": {},
    "reward": {},
    "sft": {},
}
FILES = (
    *("preferences.jsonl", "instructions.json", "gsm8k_train.jsonl", "judged-answers.jsonl", "corpus.txt", "mnist"),
    *("tokenizer", "base-model", "teacher-model", "runs/reward", "runs/value", "large", "packed", "small"),
)
TASKS = {"lenet_mnist": None, "reward": "sequence-classification"}


@pytest.fixture(autouse=True)
def named_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recipes name is there, with nothing in it."""
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / name).mkdir(parents=True)


@pytest.mark.parametrize("name", BESIDE)
def test_the_roles_of_a_published_recipe(name: str) -> None:
    recipe = load(RECIPES / f"{name}.yaml").recipe
    roles = roles_of(recipe)
    policy = roles.pop("policy")
    assert isinstance(policy, TrainedModel) and (policy.section, policy.adapter) == (recipe.model, recipe.adapter)
    assert policy.task == task_of(recipe) == TASKS.get(name, "causal-lm")
    assert roles == BESIDE[name]


def changed(tmp_path: Path, name: str, **changes: Any) -> Recipe:
    values = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in {**values, **changes}.items() if value is not None}))
    return load(path).recipe


def test_the_model_of_values_by_what_it_shares(tmp_path: Path) -> None:
    own = roles_of(changed(tmp_path, "ppo", value={"share": "none", "model": "runs/reward"}))
    assert own["value"] == TrainedModel(Model(path="runs/reward"), task="sequence-classification")
    assert roles_of(changed(tmp_path, "ppo", value="none"))["value"] == TrainedModel(
        BASE, task="sequence-classification"
    )
    on_base = changed(tmp_path, "ppo", adapter="lora", value={"share": "base", "adapter": {"kind": "lora", "rank": 3}})
    assert roles_of(on_base)["value"] == ValueAdapter(Lora(rank=3))
    read = changed(tmp_path, "ppo", adapter="lora", value={"share": "base", "model": "runs/value"})
    assert roles_of(read)["value"] == ValueAdapter(None, "runs/value")


def test_references_and_what_they_share_with_the_policy(tmp_path: Path) -> None:
    assert roles_of(changed(tmp_path, "dpo", adapter="lora", reference=None))["reference"] == PolicyWithoutAdapter()
    moving = {"kind": "frozen", "every": 8, "mix": 0.5}
    assert roles_of(changed(tmp_path, "dpo", reference=moving))["reference"] == ModelSpec(
        "reference", BASE, None, Mixing(8, 0.5)
    )
    packed = changed(tmp_path, "dpo", adapter="lora", quantization="nf4", reference="frozen")
    assert roles_of(packed)["reference"] == ModelSpec("reference", BASE, Nf4())
    assert roles_of(packed)["policy"] == TrainedModel(BASE, packed.adapter, Nf4())
    with_effect = changed(tmp_path, "dpo", adapter="pissa", reference="cached")
    assert roles_of(with_effect)["reference"] == CachedModel(None)  # the policy itself answers before training


def test_teachers_that_are_cached_and_a_draft(tmp_path: Path) -> None:
    teachers = [{"model": "large"}, {"model": "packed", "quantization": "nf4"}]
    two = roles_of(changed(tmp_path, "distill", teacher=teachers))
    assert list(two) == ["policy", "teacher", "teacher.1"]
    assert two["teacher.1"] == ModelSpec("teacher.1", Model(path="packed"), Nf4())
    cached = roles_of(changed(tmp_path, "distill", teacher=[{"model": "large", "cache": True, "top_k": 8}]))
    assert cached["teacher"] == CachedModel(ModelSpec("teacher.0", Model(path="large")))
    drafts = changed(tmp_path, "grpo", rollout={"draft": {"kind": "model", "model": "small"}, "samples": 4})
    assert roles_of(drafts)["draft"] == ModelSpec("rollout.draft", Model(path="small"))


def test_steps_are_tokens_that_are_classified(tmp_path: Path) -> None:
    assert task_of(changed(tmp_path, "reward", objective="stepwise")) == "token-classification"


def test_they_are_told_without_torch() -> None:
    code = "import sys, danlu.recipe.roles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
