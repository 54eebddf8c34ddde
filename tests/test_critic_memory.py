"""What PPO is expected to hold with a critic, and with reward models beside the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.placed_decoder import placed_of
from builders.planned_memory import counted_states, planned, planned_parts
from builders.tiny_world import World
from test_rl_runs import recipe_file

from danlu.assembly.optimizer import optimizer_of
from danlu.core.memory_parts import MemoryParts
from danlu.models.hf_folder import read_config
from danlu.parallel.layout import Layout
from danlu.planning.rank_memory import rank_states
from danlu.recipe import Recipe, load
from danlu.recipe.sections import Lora
from danlu.run.read_workload import read_workload
from danlu.stages.role_configs import own_reward_bytes, shared_rewards

CRITICS: dict[str, dict[str, Any]] = {
    "head": {},
    "base": {"adapter": "lora", "value": {"share": "base", "adapter": {"kind": "lora", "rank": 3}}},
    "none": {"value": "none"},
    "none beside an adapter": {"adapter": "lora", "value": "none"},
}


def recipe_of(world: World, tmp_path: Path, **more: Any) -> Recipe:
    return load(recipe_file(world, tmp_path / "run", stage="ppo", precision="bf16", **more)).recipe


def foreseen(recipe: Recipe, config: Any) -> MemoryParts:
    return planned_parts(recipe, config, micro=2)


@pytest.mark.parametrize("critic", CRITICS)
def test_shapes_alone_tell_what_is_held_but_for_the_score_head(tiny_world: World, tmp_path: Path, critic: str) -> None:
    recipe = recipe_of(tiny_world, tmp_path, **CRITICS[critic])
    placed = placed_of(recipe)
    config = placed.model.config
    expected, _ = counted_states(placed, optimizer_of(placed.parameters(), recipe, torch.device("cpu")))
    workload = read_workload(recipe, config, judges=True)
    parts, counted = vars(rank_states(workload, Layout()).parts), vars(expected)
    head = 4 * config.hidden_size  # bytes in float32
    for name, value in counted.items():
        assert 0 <= value - parts[name] <= 2 * head + 4, name
    assert counted["gradients"] > parts["gradients"]
    if critic != "head":  # control: a second pass with gradients has activations of its own
        plain = foreseen(recipe.model_copy(update={"value": None}), config)
        of_both, of_one = (each.activations + each.logits for each in (foreseen(recipe, config), plain))
        assert of_both > 1.4 * of_one


def test_a_second_pass_leaves_room_for_fewer_sequences(tiny_world: World, tmp_path: Path) -> None:
    batch = {"prompts": 64, "micro": "auto", "memory": 0.02}
    sizes = {}
    for critic in ("head", "base"):
        more = {**CRITICS[critic], "adapter": "lora", "batch": batch}
        recipe = recipe_of(tiny_world, tmp_path, **more)
        sizes[critic] = planned(recipe, read_config(tiny_world.base)).micro
    assert 1 <= sizes["base"] < 0.7 * sizes["head"]


def test_a_reward_model_is_counted_unless_it_judges_on_the_policys_base(tiny_world: World, tmp_path: Path) -> None:
    path = str(adapter_folder(tiny_world.base, tmp_path / "reward", Lora(rank=3), scores=True))
    config = read_config(tiny_world.base)
    rewards = [{"kind": "model", "path": path}]
    beside, upon = (recipe_of(tiny_world, tmp_path, rewards=rewards, adapter=adapter) for adapter in (None, "lora"))
    without = recipe_of(tiny_world, tmp_path)
    own = own_reward_bytes(beside, ())
    classifier = replace(config, task="sequence-classification")
    assert own == 2 * classifier.parameter_count() and shared_rewards(beside) == [] and shared_rewards(upon) == [path]
    assert foreseen(beside, config).weights == foreseen(without, config).weights + own
    alone = upon.model_copy(update={"rewards": without.rewards})
    assert foreseen(upon, config).total == foreseen(alone, config).total
