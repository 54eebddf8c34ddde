"""The search finds the layouts that planning every one of them finds, and says what lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.expert_folder import EXPERTS
from builders.tiny_world import CONFIG, World

from danlu.core.errors import RecipeError
from danlu.models.hf_config import read_config_values
from danlu.planning import search as search_module
from danlu.planning.chunk_costs import LayerTimes
from danlu.planning.cluster import Cluster
from danlu.planning.search import Bounds, Candidate, LeastMemory, Space, evaluate, search
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import load
from danlu.run.read_workload import read_workload

DENSE = {**CONFIG, "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 5000}
MIXTURE = {**EXPERTS, "num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 256, "vocab_size": 5000}
SPACE = Space(
    tensor=(1, 2),
    context=(1, 2),
    expert=(1, 2),
    stages=(1, 2, 4),
    schedules=(("1f1b", None), ("interleaved", 2), ("zbv", None)),
    shards=("none", "zero3"),
    micro=(1, 4),
    recompute=("none", "full"),
)


def workload_of(world: World, folder: Path, config: dict[str, Any]) -> Workload:
    changes = {"batch": {"sequences": 64}, "data": {"max_length": 1024}, "model": {"config": config}}
    recipe = load(world.recipe(folder / "run", precision="bf16", **changes)).recipe
    return read_workload(recipe, read_config_values(config), judges=False)


def target_of(on: str, memory_bytes: int) -> Target:
    cluster = Cluster.of(on)
    return Target(replace(cluster, card=replace(cluster.card, memory_bytes=memory_bytes)))


def every_one(workload: Workload, target: Target) -> list[Candidate]:
    times = LayerTimes(target.speeds)  # type: ignore[arg-type]
    choices = SPACE.choices(workload, target.cluster.ranks)
    planned = (evaluate(workload, choice, target, times) for choice in choices)
    return sorted(each for each in planned if each is not None)


@pytest.mark.parametrize(
    ("config", "on", "memory_bytes"), [(DENSE, "8xH100-80G", 1 << 30), (MIXTURE, "2x8xA100-80G", 300 << 20)]
)
def test_the_search_finds_what_planning_every_choice_finds(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], on: str,
    memory_bytes: int,
) -> None:  # fmt: skip
    workload, target = workload_of(tiny_world, tmp_path, config), target_of(on, memory_bytes)
    expected = every_one(workload, target)
    choices = list(SPACE.choices(workload, target.cluster.ranks))
    assert len(set(choices)) == len(choices) > len(expected) > 5, "some do not fit"
    assert search(workload, SPACE, target, top=5) == expected[:5]
    times = LayerTimes(target.speeds)  # type: ignore[arg-type]
    bounds, least = Bounds(workload, target, times), LeastMemory(workload, target)
    for candidate in expected:
        assert bounds.quick(candidate.choice) <= candidate.seconds * (1 + 1e-9)
        assert bounds.close(candidate.choice) <= candidate.seconds * (1 + 1e-9)
        assert least.of(candidate.choice) <= candidate.bytes
    # Control: bounds that are too high lose the fastest layout.
    fastest, quick = expected[0].choice, Bounds.quick
    monkeypatch.setattr(
        search_module.Bounds, "quick", lambda own, choice: quick(own, choice) + 9e9 * (choice == fastest)
    )
    assert search(workload, SPACE, target, top=5) != expected[:5]


def test_nothing_that_fits_and_no_speeds_are_said(tiny_world: World, tmp_path: Path) -> None:
    workload = workload_of(tiny_world, tmp_path, DENSE)
    with pytest.raises(RecipeError, match="no layout of 8 x H100-80G holds this recipe"):
        search(workload, SPACE, target_of("8xH100-80G", 1 << 20))
    with pytest.raises(RecipeError, match="danlu bench machine"):
        search(workload, SPACE, Target(Cluster.here(None, 1)))


def test_overrides_give_the_recipe_of_a_choice(tiny_world: World, tmp_path: Path) -> None:
    workload, target = workload_of(tiny_world, tmp_path, DENSE), target_of("8xH100-80G", 1 << 34)
    for candidate in search(workload, SPACE, target, top=12):
        recipe = load(tmp_path / "run.yaml", candidate.choice.overrides()).recipe
        planned = candidate.choice.recipe(workload.recipe)
        assert (recipe.parallel, recipe.memory.recompute) == (planned.parallel, planned.memory.recompute)
        assert recipe.batch.micro == candidate.plan.micro
