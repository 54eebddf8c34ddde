"""The kinds that a plan expects of `memory.recompute: planned`: bytes that a run measures, within its budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import CONFIG, World

from danlu.core.errors import RecipeError
from danlu.memory.recompute_choice import LayerCosts, least_peak_bytes
from danlu.memory.recompute_planner import measure_layers
from danlu.models.attend import PackedAttention
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.parallel.layout import Layout
from danlu.planning.cluster import Cluster
from danlu.planning.planned_kinds import _Costs, _standard_speeds, planned_kinds
from danlu.planning.step import plan_step
from danlu.planning.step_plan import StepPlan
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import load
from danlu.run.read_workload import read_workload

DEEP = {**CONFIG, "num_hidden_layers": 6, "vocab_size": 400}
LENGTH = 128


def workload_of(world: World, folder: Path, **recompute: Any) -> Workload:
    changes = {
        "model": {"config": DEEP},
        "data": {"max_length": LENGTH},
        "batch": {"sequences": 4, "micro": 2},
        "memory": {"recompute": recompute or {"kind": "none"}},
    }
    recipe = load(world.recipe(folder / "run", **changes)).recipe
    return read_workload(recipe, read_config_values(DEEP), judges=False)


def measured(workload: Workload) -> list[LayerCosts]:
    model = build(read_config_values(DEEP))
    initialize(model, 0)
    tokens = torch.zeros(2 * LENGTH, dtype=torch.int64)
    positions = torch.arange(LENGTH).repeat(2)
    boundaries = (0, LENGTH, 2 * LENGTH)
    recomputing = PackedAttention(boundaries, recomputed_layers=range(6))
    attend = PackedAttention(boundaries)
    return measure_layers(model, tokens, positions, attend, torch.float32, recomputing=recomputing)


def test_bytes_of_each_kind_are_those_that_a_run_measures(tiny_world: World, tmp_path: Path) -> None:
    workload = workload_of(tiny_world, tmp_path)
    expected = list(_Costs(workload, "cpu", _standard_speeds()).of_stage(0))
    for own, real in zip(expected, measured(workload), strict=True):
        assert own.layer == real.layer and own.whole_bytes == real.whole_bytes
        assert {each.kind: each.kept_bytes for each in own.options} == {
            each.kind: each.kept_bytes for each in real.options
        }
        assert len({each.kept_bytes for each in own.options}) == 4  # control: no two kinds keep the same


def test_a_plan_keeps_to_the_budget(tiny_world: World, tmp_path: Path) -> None:
    costs = list(_Costs(workload_of(tiny_world, tmp_path), "cpu", _standard_speeds()).of_stage(0))
    least, most = least_peak_bytes(costs), sum(each.whole_bytes for each in costs)
    assert least < most
    budget = (least + most) / 2

    def plan(**recompute: Any) -> StepPlan:
        workload = workload_of(tiny_world, tmp_path, **recompute)
        return plan_step(workload, Layout(), Target(Cluster.here()))

    whole, chosen = plan(kind="none"), plan(kind="planned", budget=budget / 2**30)
    full = plan(kind="full")
    allocated = [each.worst.memory.parts.activations for each in (full, chosen, whole)]
    assert allocated == sorted(set(allocated))
    assert any("planned chooses by expected seconds" in said for said in chosen.assumptions)
    assert allocated[2] - allocated[1] >= most - budget - max(each.whole_bytes for each in costs)
    with pytest.raises(RecipeError, match="is less than the activations of a micro-batch need"):
        plan(kind="planned", budget=0.9 * least / 2**30)


def test_layers_without_a_choice_count_as_if_they_kept_all(tiny_world: World, tmp_path: Path) -> None:
    workload = workload_of(tiny_world, tmp_path, kind="planned", budget=1.0)
    assert workload.recompute(workload.chunks(0)) == []
    kinds = planned_kinds(workload, "cpu", None)
    assert kinds == ("none",) * 6  # a budget that holds all
    chosen = replace(workload, planned_kinds=kinds)
    assert [each.kind for each in chosen.recompute(chosen.chunks(0))] == ["none"] * 6
