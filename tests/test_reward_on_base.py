"""A reward model that is an adapter on the policy's base: it judges upon that as it does upon a base of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.tiny_world import World
from test_rl_runs import recipe_file, run

from danlu.assembly.parallelize import Subject, subject_of
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe, load
from danlu.recipe.sections import Lora
from danlu.rewards.protocol import JudgedAnswer
from danlu.stages.builder import DecoderBuilder
from danlu.stages.reward_model import RewardModel, load_reward_model
from danlu.stages.rewards import rewards_on_base
from danlu.stages.role_configs import resolve_reward_model
from danlu.stages.table import STAGES

ANSWERS = [JudgedAnswer(text, {}, "3 and 4") for text in ("one", "two and three", "")]


@pytest.fixture(scope="module")
def reward(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "adapter"
    return adapter_folder(tiny_world.base, folder, Lora(rank=3), size=0.3, scores=True)


def changes(reward: Path, **more: Any) -> dict[str, Any]:
    return {"adapter": "lora", "rewards": [{"kind": "model", "path": str(reward)}], "precision": "fp32", **more}


def judges_of(
    world: World, tmp_path: Path, reward: Path, **more: Any
) -> tuple[dict[str, RewardModel], list[str], Subject]:
    recipe: Recipe = load(recipe_file(world, tmp_path / "run", **changes(reward, **more))).recipe
    config = DecoderBuilder(recipe, STAGES["rl"])._config(None)
    subject = subject_of(recipe, config, torch.device("cpu"))
    return *rewards_on_base(recipe, subject, Ranks()), subject


def test_scores_are_those_of_a_base_of_its_own(tiny_world: World, tmp_path: Path, reward: Path) -> None:
    judges, (line,), subject = judges_of(tiny_world, tmp_path, reward)
    own = load_reward_model(resolve_reward_model(str(reward)), precision="fp32", device="cpu")
    (judge,) = judges.values()
    assert judge(ANSWERS) == own(ANSWERS) and len(set(own(ANSWERS))) == 3
    assert "rewards.0:" in line and "is an adapter on the policy's base" in line and "is not loaded again" in line
    assert subject.adapters is not None and subject.adapters.active == ("default",)
    trained = {name for name, parameter in subject.model.named_parameters() if parameter.requires_grad}
    assert trained == set(subject.adapters.tensors("default"))
    (name,) = (name for name in subject.adapters.added if name != "default")
    with torch.no_grad():  # control: it is this adapter that judges
        next(iter(subject.adapters.tensors(name).values())).add_(0.5)
    assert judge(ANSWERS) != own(ANSWERS)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"adapter": "pissa"}, "the policy's adapter took its start out of it"),
        ({"quantization": {"kind": "nf4", "block": 32}}, "the policy's is held in other bits"),
        ({"adapter": None}, None),
    ],
)
def test_where_it_cannot_judge_on_the_policys_base_it_is_loaded_and_told(
    tiny_world: World, tmp_path: Path, reward: Path, more: dict[str, Any], reason: str | None
) -> None:
    judges, lines, _ = judges_of(tiny_world, tmp_path, reward, **more)
    assert not judges
    assert not lines if reason is None else f"loads once more: {reason}" in lines[0]


def test_policy_reference_reward_and_values_are_adapters_on_one_base(
    tiny_world: World, tmp_path: Path, reward: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"stage": "ppo", "steps": 2, "data": {"eval": None}, "evaluation": {"every": None}}
    shared = changes(reward, value={"share": "base", "model": str(reward)}, **more)
    lines = run(tiny_world, tmp_path / "shared", **shared)
    assert "is not loaded again" in capsys.readouterr().err
    # Values start as what the reward model says, so at the last token of an answer they are its reward.
    assert lines[0]["value"] != 0 and lines[0]["reward/model"] == lines[0]["reward"]
    apart = run(tiny_world, tmp_path / "apart", **{**shared, "value": {"share": "none", "model": str(reward)}})
    assert apart[0]["reward"] == pytest.approx(lines[0]["reward"], rel=1e-6)
    assert apart[0]["value"] == pytest.approx(lines[0]["value"], rel=1e-5)
    assert apart[1]["value"] != pytest.approx(lines[1]["value"], rel=1e-5)  # control: other parameters are trained
