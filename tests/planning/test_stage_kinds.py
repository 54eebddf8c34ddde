"""Stages that are alike have one plan: that of each by itself is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.expert_folder import EXPERTS
from builders.tiny_world import CONFIG, World

from danlu.models.hf_config import read_config_values
from danlu.parallel.layout import layout_of
from danlu.planning.cluster import Cluster
from danlu.planning.plan_cache import PlanCache
from danlu.planning.stage_kinds import StageKinds
from danlu.planning.step import StepPlanner
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import load
from danlu.run.read_workload import read_workload

DENSE = {**CONFIG, "num_hidden_layers": 11, "vocab_size": 1000}
MIXTURE = {**EXPERTS, "num_hidden_layers": 9, "first_k_dense_replace": 2}
UPPER_LAYERS = {"kind": "lora", "rank": 4, "targets": ["q_proj", "down_proj"], "layers_to_transform": [6, 7, 8]}


def workload_of(world: World, folder: Path, config: dict[str, Any], changes: dict[str, Any]) -> Workload:
    common = {"batch": {"sequences": 64, "micro": 2}, "precision": "bf16", "model": {"config": config}}
    recipe = load(world.recipe(folder / "run", **{**common, **changes})).recipe
    return read_workload(recipe, read_config_values(config), judges=False)


def plan_of(workload: Workload, target: Target) -> tuple[Any, ...]:
    layout = layout_of(workload.recipe.parallel, target.cluster.ranks)
    planner = StepPlanner(workload, layout, target, PlanCache(workload, target))
    return planner.plan(), len(set(map(id, planner._stages)))


@pytest.mark.parametrize(
    ("config", "pipeline", "changes"),
    [
        (DENSE, {"stages": 4}, {}),
        (DENSE, {"stages": 4, "schedule": "zbv"}, {"shard": "zero3"}),
        (DENSE, {"stages": 4, "schedule": "interleaved"}, {"tensor": 2, "sequence": True}),
        (DENSE, {"stages": 4, "schedule": "pipedream"}, {}),
        (MIXTURE, {"stages": 8}, {"expert": 1}),
    ],
)
def test_each_stage_by_itself_has_the_same_plan(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, pipeline: Any, changes: Any
) -> None:
    workload = workload_of(tiny_world, tmp_path, config, {"parallel": {"pipeline": pipeline, **changes}})
    target = Target(Cluster.of("8xH100-80G"))
    plan, kinds = plan_of(workload, target)
    with monkeypatch.context() as patch:
        patch.setattr(StageKinds, "of_stage", lambda self, workload, stage: stage)
        patch.setattr(StageKinds, "of_chunk", lambda self, chunks, chunk: chunk)
        alone, every = plan_of(workload, target)
    assert plan == alone and kinds <= every == plan.layout.pipeline
    # Control: stages of which only the number of chunks counts are not alike.
    monkeypatch.setattr(StageKinds, "of_stage", lambda self, workload, stage: 0)
    assert plan_of(workload, target)[0] != alone


def test_layers_of_other_kinds_are_told_apart(tiny_world: World, tmp_path: Path) -> None:
    dense = StageKinds(workload_of(tiny_world, tmp_path, DENSE, {}))
    assert dense.of_policy == (0,) * 11
    mixture = StageKinds(workload_of(tiny_world, tmp_path, MIXTURE, {}))
    assert mixture.of_policy == (0,) * 2 + (1,) * 7


def test_unlike_chunks_of_a_stage_do_not_share_bytes(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk has dense layers and the embedding, the last ones experts alone."""
    pipeline = {"stages": 2, "schedule": "interleaved", "chunks": 4}
    workload = workload_of(tiny_world, tmp_path, MIXTURE, {"parallel": {"pipeline": pipeline}})
    target = Target(Cluster.of("2xH100-80G"))
    layout = layout_of(workload.recipe.parallel, 2)

    def costs() -> list[Any]:
        cache = PlanCache(workload, target)
        return cache.costs_of(workload, layout, cache.stage_of(workload, layout, 0), 2)

    shared = costs()
    monkeypatch.setattr(StageKinds, "of_chunk", lambda self, chunks, chunk: chunk)
    alone = costs()
    assert shared == alone and len(set(alone)) > 1
    monkeypatch.setattr(StageKinds, "of_chunk", lambda self, chunks, chunk: 0)
    assert costs() != alone, "control"
