"""Routers that draw experts do so in training steps, with or without adapters, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders.placed_decoder import placed_of
from builders.tiny_run import SyntheticPacks, tiny_model
from torch import Tensor

from danlu.core.errors import RecipeError
from danlu.models.router_replay import routers_of
from danlu.models.saving import save
from danlu.recipe import load
from danlu.stages.placed import PlacedDecoder
from danlu.training.executor import Executor
from danlu.training.learner import MicroStep, StepItems

MODEL = {
    "model_type": "phimoe",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 6,
    "router_jitter_noise": 0.45,
    "input_jitter_noise": 0.1,
}
RL = {"stage": "rl", "rewards": {"kind": "exact", "column": "a"}}


def placed(folder: Path, **changes: Any) -> PlacedDecoder:
    (folder / "rows.jsonl").write_text('{"a": "b"}\n')
    values: dict[str, Any] = {
        "stage": "sft",
        "model": {"config": MODEL, "tokenizer": "none"},
        "data": str(folder / "rows.jsonl"),
        "output": "runs/x",
        **changes,
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return placed_of(load(str(file)).recipe)


def loss(placed: PlacedDecoder, step: int | None, number: int = 0) -> float:
    learner, pack = placed.learner(1), SyntheticPacks().at(0)
    totals = learner.totals([pack])
    micro_step = MicroStep(learner.collate([pack]), [(number, pack)], totals, step)
    with learner.at(micro_step):
        return float(learner.forward(0, micro_step, None).total.detach())


@pytest.mark.parametrize("training", ["full", "lora"])
def test_a_training_step_draws(tmp_path: Path, training: str) -> None:
    changes: dict[str, Any] = {}
    if training == "lora":
        save(tiny_model(**MODEL), tmp_path / "base")
        changes = {"model": str(tmp_path / "base"), "adapter": {"kind": "lora"}}
    model = placed(tmp_path, **changes)
    first = loss(model, 1)
    assert loss(model, 1) == first
    assert len({first, loss(model, 2), loss(model, 1, number=1), loss(model, None)}) == 4
    assert loss(placed(tmp_path, seed=7, **changes), 1) != first
    assert loss(model, None) == loss(model, None)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_recomputed_layer_draws_the_same_experts(tmp_path: Path, kind: str) -> None:
    def gradients(step: int, **changes: Any) -> dict[str, Tensor]:
        model = placed(tmp_path, precision="fp32", **changes)
        learner, pack = model.learner(1), SyntheticPacks().at(0)
        step_items = StepItems([pack], [[0]], learner.totals([pack]), step=step)
        Executor(learner, step_items).run(learner.parallel.actions(1))
        return {name: parameter.grad for name, parameter in model.parameters() if parameter.grad is not None}

    plain, recomputed = gradients(1), gradients(1, memory={"recompute": kind})
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=1e-7)
    other = gradients(2)
    assert max(float((other[name] - gradient).abs().max()) for name, gradient in plain.items()) > 1e-3  # control


def test_a_policy_gradient_draws_no_experts(tmp_path: Path) -> None:
    """The rollout drew none, and the ratio is to that policy."""
    model = placed(tmp_path, **RL, data={"train": str(tmp_path / "rows.jsonl"), "prompt": "{a}"})
    model.learner(1)
    assert all(router.draws is None for router in routers_of(model.model).values())


def test_replicas_in_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="parallel.workers: threads has no random numbers for the routers of phimoe"):
        placed(tmp_path, parallel={"workers": "threads", "data": 2}).learner(1)
