"""The rollout engine of a recipe: its settings, the policy's adapters, and weights that fit or do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import rollout_worker
from builders.rollout_worker import REQUESTS
from builders.tiny_run import tiny_model
from builders.tiny_world import World

from danlu.assembly.parallelize import Placed
from danlu.core.errors import DataError, ResourceError
from danlu.inference import sharded_weights
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.sharded_weights import ShardedWeights
from danlu.parallel.ranks import Ranks
from danlu.planning.cache_memory import EngineBounds
from danlu.recipe import Recipe, load
from danlu.recipe.sections import DraftModel, Ngram, Parallel, Rollout
from danlu.stages.rollout import engine_options, rollout_engine


def recipe_of(world: World, folder: Path, **changes: Any) -> Recipe:
    start = {"model": {"path": str(world.base), "config": None, "tokenizer": None}}
    sampled = {"evaluation": {"every": 5, "samples": "hi"}}
    return load(world.recipe(folder / "run", **{**start, **sampled, **changes})).recipe


def placed_policy(recipe: Recipe) -> Placed:
    torch.set_num_threads(1)
    return rollout_worker.placed_policy(recipe, Ranks())


def test_settings_of_the_engine_are_the_recipes(tiny_world: World, tmp_path: Path) -> None:
    assert engine_options(recipe_of(tiny_world, tmp_path)) == EngineOptions(), "the defaults are the same"
    values: dict[str, Any] = {"block": 8, "cache_gib": 0.5, "packed_gib": 0.25, "batch_tokens": 64, "sequences": 3}
    values |= {"prefix_sharing": False, "preempt": "swap", "swap_gib": 1.5}
    recipe = recipe_of(tiny_world, tmp_path, numerics="exact").model_copy(update={"rollout": Rollout(**values)})
    assert engine_options(recipe) == EngineOptions(**values, exact=True)
    for draft, options in (
        (Ngram(tokens=6, longest=2), DraftOptions("ngram", 6, 2)),
        (DraftModel(model="small", tokens=2), DraftOptions("model", 2, model="small")),
    ):
        recipe = recipe.model_copy(update={"rollout": Rollout(draft=draft)})
        assert engine_options(recipe).draft == options


def test_a_plan_has_the_bounds_of_the_engine(tiny_world: World, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_world, tmp_path)
    other = {"sequences": 3, "batch_tokens": 77, "block": 8, "cache_gib": 0.5, "prefix_sharing": False}
    for section in (Rollout(), Rollout(**other), Rollout(preempt="swap", swap_gib=1.5, draft=Ngram(tokens=6))):
        recipe = recipe.model_copy(update={"rollout": section})
        assert EngineBounds.of(recipe) == engine_options(recipe).bounds, f"{section}"


def test_every_setting_of_the_engine_is_a_key() -> None:
    fields = set(EngineOptions.__dataclass_fields__) - {"exact", "routes", "fp8_recipe"}  # which follow from other keys
    assert fields <= set(Rollout.model_fields)
    defaults = {name: getattr(Rollout(), name) for name in fields}
    assert defaults == {name: getattr(EngineOptions(), name) for name in fields}


def test_the_trained_adapter_answers_and_the_base_can_be_asked(tiny_world: World, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_world, tmp_path, adapter={"kind": "prompt", "tokens": 3})
    engine = rollout_engine(recipe, placed_policy(recipe))
    policy = engine.generate(REQUESTS)
    named = engine.generate([replace(request, adapter="policy") for request in REQUESTS])
    base = engine.generate([replace(request, adapter="none") for request in REQUESTS])
    plain = recipe_of(tiny_world, tmp_path)
    without = rollout_engine(plain, placed_policy(plain)).generate(REQUESTS)
    assert [each.tokens for each in named] == [each.tokens for each in policy]
    assert [each.tokens for each in base] == [each.tokens for each in without]
    assert [each.tokens for each in base] != [each.tokens for each in policy]
    with pytest.raises(DataError, match="prompt 3: no adapter 'polcy'; there are policy, none"):
        engine.generate([replace(REQUESTS[0], adapter="polcy")])


def test_a_cache_that_holds_nothing_is_told_when_the_engine_is_made(tiny_world: World, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_world, tmp_path, rollout={"cache_gib": 1e-9})
    with pytest.raises(ResourceError, match="cache_gib: 1e-09 does not hold one block of 16 tokens"):
        rollout_engine(recipe, placed_policy(recipe))
    recipe = recipe_of(tiny_world, tmp_path, rollout={"cache_gib": 0.5})
    engines = [rollout_engine(recipe, placed_policy(recipe), cache_gib=need) for need in (None, 1e-4, 5.0)]
    blocks = [engine.statistics.blocks for engine in engines if isinstance(engine, EmbeddedEngine)]
    assert blocks[0] == blocks[2] > blocks[1]


def test_a_draft_model_proposes_and_changes_no_greedy_answer(tiny_world: World, tmp_path: Path) -> None:
    greedy = [request for request in REQUESTS if request.sampling.temperature == 0]
    plain = recipe_of(tiny_world, tmp_path)
    wanted = rollout_engine(plain, placed_policy(plain)).generate(greedy)
    drafts: list[Any] = [{"kind": "ngram", "longest": 1}, {"kind": "model", "model": str(tiny_world.base)}]
    for draft in drafts:
        recipe = recipe_of(tiny_world, tmp_path, rollout={"draft": draft})
        engine = rollout_engine(recipe, placed_policy(recipe))
        assert [each.tokens for each in engine.generate(greedy)] == [each.tokens for each in wanted]
        assert isinstance(engine, EmbeddedEngine) and engine.statistics.drafts_accepted > 0


@pytest.mark.parametrize(
    ("free_gib", "gather", "in_step"),
    [(12.0, "auto", False), (11.9, "auto", True), (12.0, "layer", True), (0.1, "all", False), (None, "auto", False)],
)
def test_weights_are_gathered_where_they_and_the_cache_fit(
    monkeypatch: pytest.MonkeyPatch, free_gib: float | None, gather: Any, in_step: bool
) -> None:
    """4 GiB of weights and 2 of cache on each of two processes that share a machine."""
    monkeypatch.setattr(sharded_weights.data, "reshard", lambda model: None)
    free = None if free_gib is None else int(free_gib * 2**30)
    monkeypatch.setattr(sharded_weights, "available_bytes", lambda device: free)
    said: list[str] = []
    weights = ShardedWeights(
        tiny_model(),
        Parallel(shard="zero3"),
        Rollout(gather=gather),
        Ranks(),
        dtype=torch.float32,
        whole_bytes=4 * 2**30,
        processes_here=2,
        log=said.append,
    )
    for _ in range(2):
        weights.open()
        assert weights.in_step == in_step
        weights.close()
    assert len(said) == (in_step and gather == "auto"), "once, however often it is opened"
    assert not said or "4.00 GiB on each process, which do not fit" in said[0]
