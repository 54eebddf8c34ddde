"""Seconds and bytes of the host's memory of what is offloaded from a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import CONFIG, World

from danlu.models.hf_config import read_config_values
from danlu.planning.cluster import Cluster
from danlu.planning.offload_seconds import LOCKED, PAGED
from danlu.planning.step_plan import StepPlan
from danlu.planning.target import Target
from danlu.recipe import load
from danlu.run.planned_step import planned_step

SIZES = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 5000}
PARAMETERS = read_config_values({**CONFIG, **SIZES}).parameter_count()


def plan_of(world: World, folder: Path, offload: list[str], pcie: float, cards: int = 1, **changes: Any) -> StepPlan:
    cluster = Cluster.of(f"{cards}xA100-80G")
    target = Target(replace(cluster, card=replace(cluster.card, pcie=pcie)))
    values = {"batch": {"sequences": 16, "micro": 2}, "data": {"max_length": 1024}, "memory": {"offload": offload}}
    recipe = load(
        world.recipe(folder / "run", precision="bf16", model={"config": {**CONFIG, **SIZES}}, **values | changes)
    )
    return planned_step(recipe.recipe, target).plan


def seconds_of(plan: StepPlan) -> float:
    assert plan.seconds is not None
    parts = *plan.seconds.compute.values(), plan.seconds.exposed, plan.seconds.bubble
    assert math.isclose(sum(parts), plan.seconds.total)
    return plan.seconds.total


def test_state_goes_there_and_back_once_a_step(tiny_world: World, tmp_path: Path) -> None:
    before, plan = (plan_of(tiny_world, tmp_path, offload, 32e9) for offload in ([], ["optimizer"]))
    moved = 2 * plan.worst.memory.parts.optimizer + 2 * plan.stages[0].memory.host.step
    assert 16 * PARAMETERS < moved < 16.1 * PARAMETERS * 1.2, "two moments of float32, there and back"
    assert plan.seconds is not None and plan.seconds.compute["offload"] == pytest.approx(
        2 * before.worst.memory.parts.optimizer / (PAGED * 32e9)
    )
    assert seconds_of(plan) == pytest.approx(seconds_of(before) + plan.seconds.compute["offload"])


def test_passes_wait_for_copies_of_activations_as_far_as_these_take_longer(tiny_world: World, tmp_path: Path) -> None:
    none = plan_of(tiny_world, tmp_path, [], 32e9)
    fast, slow, slower = (plan_of(tiny_world, tmp_path, ["activations"], rate) for rate in (1e15, 1e6, 5e5))
    assert seconds_of(fast) == seconds_of(none), "they hide behind the computation"
    host = fast.stages[0].memory.host.step
    # Of eight micro-batches both passes wait for all that waits in the host's memory.
    assert seconds_of(slower) - seconds_of(slow) == pytest.approx(8 * 2 * host / (LOCKED * 1e6))
    kept = none.worst.memory.parts.activations
    assert 0.7 * kept < host < 1.1 * kept and host > 1.5 * fast.worst.memory.parts.activations
    assert none.stages[0].memory.host.step == 0


def test_shards_come_for_each_gather(tiny_world: World, tmp_path: Path) -> None:
    """zero3 gathers twice in a micro-batch, zero2 once a step; the host clips gradients and updates parameters."""
    rate, shards = 1e6, PARAMETERS / 4

    def longer(shard: str) -> float:
        plans = [
            plan_of(
                tiny_world, tmp_path, offload, rate, 4, parallel={"shard": shard}, batch={"sequences": 16, "micro": 1}
            )
            for offload in ([], ["parameters"])
        ]
        return seconds_of(plans[1]) - seconds_of(plans[0])

    update = (12 + 28) * shards / (LOCKED * rate)
    assert longer("zero3") == pytest.approx(2 * 4 * 4 * shards / (LOCKED * rate) + update, rel=0.02)
    # Gradients of four micro-batches go to the host, while parameters come once.
    assert longer("zero2") == pytest.approx(4 * 4 * shards / (LOCKED * rate) + update, rel=0.02)
