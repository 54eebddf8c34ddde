"""Rollout processes of a recipe: what each loads of the policy."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from builders.tiny_world import World

from danlu.assembly.parallelize import subject_of
from danlu.assembly.parameters import role_of
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.models.hf_folder import read_config
from danlu.recipe import load
from danlu.recipe.value import VALUE
from danlu.stages.learner import trained_weights
from danlu.stages.reader import tokenizer_of
from danlu.stages.rollout_processes import policy_copy


def test_the_adapter_of_values_is_not_loaded(tiny_world: World, tmp_path: Path) -> None:
    adapter = {"kind": "lora", "rank": 2}
    changes = {
        "stage": "ppo",
        "adapter": adapter,
        "value": {"share": "base", "adapter": adapter},
        "rewards": [{"kind": "length", "most": 4}],
        "rollout": {"staleness": 1, "max_new_tokens": 8},
        "data": {"prompt": "{prompt}"},
    }
    values = {**tiny_world.values(tmp_path / "run", **changes), "model": {"path": str(tiny_world.base)}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**values, "batch": {"prompts": 2}}))
    recipe = load(file).recipe
    config, device = read_config(tiny_world.base), torch.device("cpu")
    policy = policy_copy(recipe, config, device, ChatTokenizer(tokenizer_of(recipe)))
    assert not [name for name, _ in policy.model.named_parameters() if role_of(name) == VALUE]
    trainers = subject_of(recipe, config, device)  # control
    assert any(role_of(name) == VALUE for name, _ in trainers.model.named_parameters())
    handed_over = [list(trained_weights(each.model, each.adapters)) for each in (policy, trainers)]
    assert handed_over[0] == handed_over[1] != []
