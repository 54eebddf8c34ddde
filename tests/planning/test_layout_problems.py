"""The rules by which a run, a plan and a search refuse a layout before a model is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.small_layers import small_decoder
from builders.tiny_world import CONFIG, World

from danlu.core.errors import RecipeError
from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values
from danlu.parallel.layout import Layout, layout_of, placing_problems
from danlu.planning.cluster import Cluster
from danlu.planning.layout_problems import micro_batch_problems, models_problems, policy_problems
from danlu.planning.rounded_weights import rounding_problems
from danlu.planning.target import Target
from danlu.planning.workload import OtherModel
from danlu.recipe import load, sections
from danlu.recipe.sections import Recipe
from danlu.run.planned_step import planned_step
from danlu.run.read_workload import read_workload

INT3 = sections.Int3(group=32, trained=True)
GALORE, OFFLOADED = {"optimizer": {"kind": "galore"}}, {"memory": {"offload": ["parameters"]}}


def recipe_of(**changes: Any) -> Recipe:
    values = {"stage": "sft", "model": {"path": "base"}, "data": {"train": [{"path": "rows.jsonl"}]}, "output": "run"}
    return Recipe.model_validate({**values, **changes})


def rounded(group: int, **changes: Any) -> Recipe:
    return recipe_of(quantization=INT3.model_copy(update={"group": group}).model_dump(), **changes)


def test_blocks_that_are_trained_fit_layers_whole_and_cut() -> None:
    config = small_decoder(None, None, 1).config  # inputs of 128 and 384
    for recipe in (rounded(32), rounded(32, parallel={"tensor": 4})):
        assert not list(rounding_problems(recipe, config))
    (indivisible,) = rounding_problems(rounded(48), config)
    assert (
        indivisible.startswith("quantization.group: 48 does not divide the 128 inputs of ") and "Use 128" in indivisible
    )
    (cut,) = policy_problems(rounded(64, parallel={"tensor": 4}), config)
    assert cut.startswith("parallel.tensor: 4 ranks would have parts of the blocks of 1 x 64 weights")
    experts = small_decoder(None, "experts", 1).config
    (adapted,) = rounding_problems(rounded(32, adapter={"kind": "lora", "targets": ["experts"]}), experts)
    assert adapted.startswith("adapter.targets: ") and "are the matrices of experts" in adapted
    assert not list(rounding_problems(rounded(32, adapter={"kind": "lora"}), experts))


@pytest.mark.parametrize(
    ("changes", "parallel", "world", "device", "refused"),
    [
        (GALORE, {}, 2, "cpu", "optimizer.kind: galore projects"),
        (GALORE, {}, 1, "cuda", None),
        (OFFLOADED, {}, 2, "cuda", "memory.offload: parameters leave a GPU"),
        (OFFLOADED, {"shard": "zero3"}, 1, "cuda", "memory.offload: parameters leave a GPU"),
        (OFFLOADED, {"shard": "zero3", "tensor": 2}, 2, "cuda", "memory.offload: parameters leave a GPU"),
        (OFFLOADED, {"shard": "zero1", "context": {"size": 2}}, 2, "cuda", None),
        (OFFLOADED, {}, 2, "cpu", None),
    ],
)
def test_settings_with_which_no_model_is_placed(
    changes: dict[str, Any], parallel: dict[str, Any], world: int, device: str, refused: str | None
) -> None:
    recipe = recipe_of(**changes, parallel=parallel)
    problems = list(placing_problems(recipe, layout_of(recipe.parallel, world), device))
    assert [problem[: len(refused or "")] for problem in problems] == ([refused] if refused else [])


def config_of(**changes: Any) -> ModelConfig:
    return read_config_values({**CONFIG, "vocab_size": 400, **changes})


def test_models_of_other_roles_are_divided_as_the_policy_is(tiny_world: World, tmp_path: Path) -> None:
    """The plan refuses what a run refuses of a teacher; on one process it refuses nothing."""
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    rows = 416
    (teacher / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": rows, "num_hidden_layers": 1}))
    changes: dict[str, Any] = {"stage": "distill", "teacher": str(teacher), "model": {"config": CONFIG}}
    cached = {**changes, "teacher": {"model": str(teacher), "top_k": 4, "cache": True}}
    layers = "teacher.0.model: {}: parallel.pipeline: 2 stages are 2 chunks, and the model has 1 layers"
    embedding = (
        f"teacher.0.model: parallel.tensor cuts the rows of all embeddings alike, but that of {teacher} has {rows}"
    )
    cases = [
        (changes, {"pipeline": 2}, layers.format(teacher)),
        (changes, {"tensor": 2}, embedding),
        (cached, {"tensor": 2}, embedding),
    ]
    for number, (own, parallel, message) in enumerate(cases):
        recipe = load(tiny_world.recipe(tmp_path / f"run{number}", **own, parallel=parallel)).recipe
        with pytest.raises(RecipeError) as refused:
            planned_step(recipe, Target(Cluster.of("2xH100-80G")))
        assert [problem.startswith(message) for problem in refused.value.problems] == [True]
        workload = read_workload(recipe, config_of(), judges=False)
        assert workload.others == (OtherModel("teacher.0.model", str(teacher), workload.others[0].config),)
        whole = recipe.model_copy(update={"parallel": sections.Parallel()})
        assert not list(models_problems(replace(workload, recipe=whole)))


def test_a_dense_teacher_is_whole_on_ranks_of_experts() -> None:
    recipe, experts = recipe_of(parallel={"expert": 2}), small_decoder(None, "experts", 1).config
    workload = read_workload(recipe_of(), experts, judges=False)
    dense = OtherModel("teacher.0.model", "dense", config_of(vocab_size=experts.vocab_size))
    assert not list(models_problems(replace(workload, recipe=recipe, others=(dense,))))
    assert list(policy_problems(recipe, dense.config)), "a dense policy has nothing to distribute"


def test_micro_batches_that_a_schedule_cannot_do() -> None:
    pipeline = {"stages": 2, "schedule": "interleaved", "chunks": 2}
    for micro, refused in ((2, True), (1, False), ("auto", False)):
        recipe = recipe_of(batch={"sequences": 10, "micro": micro}, parallel={"pipeline": pipeline})
        problems = list(micro_batch_problems(recipe, Layout(pipeline=2)))
        assert len(problems) == refused
        assert all(each.startswith("parallel.pipeline: micro-batches of a step: 5, which inter") for each in problems)
