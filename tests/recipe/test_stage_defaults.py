"""Defaults that follow from the stage: their values, what takes their place, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from danlu.recipe import load
from danlu.recipe.explanation import explain
from danlu.recipe.loading import load_resolved
from danlu.recipe.resolved_yaml import resolved_yaml
from danlu.recipe.sections import AdamW, Grpo, Recipe, Schedule
from danlu.recipe.stage_defaults import STAGE_DEFAULTS, former_values, stage_of, with_values

Write = Callable[..., str]

RATES = {  # by stage as users write it: of all weights, of an adapter
    "pretrain": (3e-4, 3e-4),
    "sft": (2e-5, 2e-4),
    "distill": (2e-5, 2e-4),
    "reward": (1e-5, 1e-4),
    "orpo": (8e-6, 8e-5),
    "dpo": (5e-7, 5e-6),
    "kto": (5e-7, 5e-6),
    "simpo": (5e-7, 5e-6),
    "online-dpo": (5e-7, 5e-6),
    "grpo": (1e-6, 1e-5),
    "ppo": (1e-6, 1e-5),
    "gkd": (1e-5, 1e-4),
}


def four_lines(stage: str, *more: str) -> str:
    """A recipe that says no more than it has to."""
    lines = [f"stage: {'distill' if stage == 'gkd' else stage}", "model: base", "data: rows.json", "output: runs/x"]
    if stage in ("distill", "gkd"):
        lines.append("teacher: base")
    if stage == "gkd":
        lines.append("on_policy: 0.5")
    if stage in ("grpo", "ppo", "online-dpo"):
        lines.append("rewards: {kind: exact, column: answer}")
    return "\n".join([*lines, *more, ""])


def read(write: Write, stage: str, *more: str, overrides: tuple[str, ...] = ()) -> Recipe:
    return load(write(four_lines(stage, *more)), overrides).recipe


@pytest.mark.parametrize("stage", RATES)
def test_rates_follow_the_stage_and_what_is_trained(write: Write, stage: str) -> None:
    full, adapter = read(write, stage), read(write, stage, "adapter: lora")
    assert (full.optimizer.learning_rate, adapter.optimizer.learning_rate) == RATES[stage]
    assert full.optimizer.weight_decay == (0.1 if stage == "pretrain" else 0.0)
    assert stage_of(full) in STAGE_DEFAULTS


def test_the_defaults_of_pretraining_are_those_of_the_sections(write: Write) -> None:
    recipe = read(write, "pretrain")
    assert recipe.optimizer == AdamW() and recipe.schedule == Schedule()
    assert recipe.batch.sequences == 8


def test_schedule_and_batch_follow_the_stage_too(write: Write) -> None:
    dpo, grpo, sft = (read(write, stage) for stage in ("dpo", "grpo", "sft"))
    assert (dpo.schedule.kind, dpo.schedule.warmup, dpo.batch.rows) == ("linear", 0.1, 32)
    assert (grpo.schedule.kind, grpo.batch.prompts) == ("constant", 16)
    assert (sft.schedule.kind, sft.schedule.warmup, sft.batch.sequences) == ("cosine", 0.03, 16)


def test_other_optimizers_keep_their_ratio_to_adamw(write: Write) -> None:
    lion, muon = read(write, "dpo", "optimizer: lion").optimizer, read(write, "sft", "optimizer: muon").optimizer
    assert (lion.kind, lion.learning_rate, lion.weight_decay) == ("lion", 5e-8, 0.0)
    assert muon.kind == "muon" and (muon.learning_rate, muon.adamw_learning_rate) == (1.3e-3, 2e-5)


def test_what_is_written_stays(write: Write) -> None:
    recipe = read(write, "dpo", "optimizer: {learning_rate: 1e-4}", "schedule: cosine", "batch: {rows: 4}")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.weight_decay) == (1e-4, 0.0)
    assert (recipe.schedule.kind, recipe.schedule.warmup, recipe.batch.rows) == ("cosine", 0.1, 4)
    assert read(write, "sft", "batch: {tokens: 2048}").batch.sequences is None


def test_overrides_change_which_defaults_hold(write: Write) -> None:
    recipe = read(write, "sft", overrides=("stage=dpo", "adapter=lora", "batch.micro=2"))
    assert recipe.optimizer.learning_rate == 5e-6
    assert (recipe.batch.rows, recipe.batch.sequences, recipe.batch.micro) == (32, None, 2)
    assert read(write, "sft", overrides=("optimizer.learning_rate=null",)).optimizer.learning_rate == 2e-5


def test_where_a_default_is_from_is_said(write: Write) -> None:
    loaded = load(write(four_lines("dpo", "batch: {rows: 4}")))
    assert explain("optimizer.learning_rate", loaded).origin == (
        "default of stage preference, all weights trained (recipe.yaml:1:8)"
    )
    assert not loaded.is_written("optimizer.learning_rate") and loaded.is_written("batch.rows")
    said = explain("optimizer.learning_rate").defaults
    assert said["sft"] == "2e-05, of an adapter 0.0002" and said["pretrain"] == "0.0003"


def test_a_recipe_in_full_reads_the_same(write: Write, tmp_path: Path) -> None:
    recipe = read(write, "orpo", "adapter: lora")
    (tmp_path / "full.yaml").write_text(resolved_yaml(recipe), encoding="utf-8")
    assert load_resolved(tmp_path / "full.yaml") == recipe


def test_former_defaults() -> None:
    assert former_values("preference", "adamw") == {
        "optimizer.learning_rate": 2e-4,
        "optimizer.weight_decay": 0.1,
        "schedule.kind": "cosine",
        "schedule.warmup": 0.05,
        "batch.rows": 8,
    }
    assert former_values("sft", "lion")["optimizer.learning_rate"] == 3e-5


def test_values_of_a_list_of_sections_are_those_of_one_of_them() -> None:
    first, second = with_values([Grpo(), Grpo()], {"1.clip": 0.3})
    assert (first, second) == (Grpo(), Grpo(clip=0.3))
