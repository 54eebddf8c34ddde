"""The peak of each stage's step, walked action by action, against the peak that torch's allocator counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from builders.peak_memory import peak_in
from builders.placed_decoder import placed_of
from builders.pretended_ranks import pretended_rank

from danlu.core.types import Pack, Sample
from danlu.memory.layer_plan import LayerPlan, plan_of_layers
from danlu.memory.recompute import plan_of
from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.hf_config import read_config_values
from danlu.objectives.loss_memory import workspace_bytes
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import Ranks
from danlu.parallel.schedules import chunks_per_rank, schedule, unsplit
from danlu.planning.activation_memory import ActivationPlan, LayerPass
from danlu.planning.batch_shape import BatchShape
from danlu.planning.chunk_memory import ChunkGradients, chunk_memory
from danlu.planning.cluster import Cluster
from danlu.planning.pipeline_split import chunk_sizes
from danlu.planning.plan_cache import PlanCache
from danlu.planning.step_walk import ChunkCost, StageWalk, walk
from danlu.planning.target import Target
from danlu.recipe import Recipe
from danlu.run.read_workload import read_workload
from danlu.training.executor import Executor
from danlu.training.learner import StepItems

LENGTH, VOCABULARY, WIDTH, STAGES = 256, 4096, 128, 2
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": LENGTH,
    "vocab_size": VOCABULARY,
}
FLOAT32 = 4


def recipe_of(kind: str | None, recompute: str, model: dict[str, Any] = MODEL) -> Recipe:
    values = {
        "stage": "pretrain",
        "model": {"config": model, "tokenizer": "none"},
        "data": {"train": [{"path": "none"}], "max_length": LENGTH},
        "parallel": {} if kind is None else {"pipeline": {"stages": STAGES, "schedule": kind}},
        "memory": {"recompute": {"kind": recompute}},
        "precision": "fp32",
        "output": "none",
    }
    return Recipe.model_validate(values)


@contextmanager
def no_messages() -> Iterator[None]:
    """Messages of pretended ranks do not arrive: what they would be in is zeros."""
    with (
        patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        patch.object(torch, "empty_like", torch.zeros_like),
    ):
        yield


def measured(recipe: Recipe, config: ModelConfig, stage: int, micro_batches: int) -> int:
    """The most bytes that a step of a stage allocates, in a process that pretends to be it."""
    layout = layout_of(recipe.parallel, STAGES if recipe.parallel.pipeline.stages > 1 else 1)
    with pretended_rank(layout, stage) if layout.world > 1 else nullcontext(Ranks()) as ranks:
        learner = placed_of(recipe, config, ranks=ranks).learner(1)
        if 0 in learner.parallel.chunks:
            learner.model.embed_tokens.sparse_gradient = False
        tokens, weights = np.ones(LENGTH, dtype=np.int32), np.ones(LENGTH, dtype=np.float32)
        weights[0] = 0
        packs = [Pack((Sample(tokens, weights, "row"),))] * micro_batches
        items = StepItems(packs, [[number] for number in range(micro_batches)], learner.totals(packs), 1)
        actions = learner.parallel.actions(micro_batches)
        with no_messages():
            Executor(learner, items).run(actions)
            learner.model.zero_grad()
            return peak_in(lambda: Executor(learner, items).run(actions))


def costs_of(recipe: Recipe, config: ModelConfig) -> list[ChunkCost]:
    section = recipe.parallel.pipeline
    sizes = chunk_sizes(section, config) if section.stages > 1 else [len(config.layers)]
    chunks = Chunks.of_sizes(sizes, range(len(sizes)))
    gradients = [0] * len(sizes)
    for name, shape in parameter_shapes(config).items():
        gradients[chunks.of_parameter(name)] += FLOAT32 * math.prod(shape)
    of_words = FLOAT32 * VOCABULARY * WIDTH
    loss = workspace_bytes(LENGTH - 1, WIDTH, VOCABULARY, element_bytes=FLOAT32, device_type="cpu", frozen=False)
    costs = []
    for chunk, layers in enumerate(chunks.layers):
        is_last = chunk == chunks.last
        settings = plan_of_layers(recipe.memory.recompute, list(layers), [layers])
        plan = ActivationPlan([LayerPass(each.kind, each.segment) for each in settings], has_head=is_last)
        own = ChunkGradients(gradients[chunk], of_words * (chunk == 0), of_words * is_last)
        part = replace(config, layers=tuple(config.layers[layer] for layer in layers))
        costs.append(chunk_memory(part, BatchShape.of_lengths([LENGTH], FLOAT32), plan, own, loss))
    return costs


def walked(kind: str | None, micro_batches: int, costs: list[ChunkCost]) -> tuple[StageWalk, ...]:
    chunks = len(costs) // STAGES
    return walk([unsplit(micro_batches)] if kind is None else schedule(kind, STAGES, chunks, micro_batches), costs)


KINDS = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
SLOW = [(kind, stage, recompute) for kind in KINDS for stage in range(STAGES) for recompute in ("none", "every")]


@pytest.mark.parametrize(
    ("kind", "stage", "recompute"),
    [("1f1b", 1, "none"), ("zb-h1", 1, "none"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_peak_of_a_stage_is_that_of_its_walk(kind: str, stage: int, recompute: str) -> None:
    recipe, config, count = recipe_of(kind, recompute), read_config_values(MODEL), 2 * STAGES
    assert chunks_per_rank(kind) * STAGES <= len(config.layers)
    costs, peak = costs_of(recipe, config), measured(recipe, config, stage, count)
    expected = walked(kind, count, costs)[stage].peak
    print("RATIO", kind, stage, recompute, expected / peak)
    assert 0.97 <= expected / peak <= 1.03, f"{expected / peak:.3f}"


def test_segments_of_a_stage_s_chunks_are_as_long_as_those_of_its_run() -> None:
    """A stage has two chunks of two layers: its segments have two, and not one, as those of a chunk alone would."""
    model = {**MODEL, "num_hidden_layers": 8}
    recipe, config = recipe_of("interleaved", "every", model), read_config_values(model)
    workload, layout = read_workload(recipe, config, judges=False), layout_of(recipe.parallel, STAGES)
    with pretended_rank(layout, 1) as ranks:
        placed = placed_of(recipe, config, ranks=ranks).learner(1).model
    cache, section = PlanCache(workload, Target(Cluster.here(None, STAGES))), recipe.memory.recompute
    kept = [each.kept for each in cache.costs_of(workload, layout, cache.stage_of(workload, layout, 1), 1)]

    def kept_by(plan: Sequence[LayerPlan], chunk: int) -> int:
        own = [LayerPass(each.kind, each.segment) for each in plan if each.layer in placed.chunks.layers[chunk]]
        part = replace(config, layers=config.layers[: len(own)])
        settings = ActivationPlan(own, has_head=chunk == placed.chunks.last)
        return chunk_memory(part, BatchShape.of_lengths([LENGTH], FLOAT32), settings, ChunkGradients(0), 0).kept

    of_run = plan_of(section, placed)
    assert kept == [kept_by(of_run, chunk) for chunk in placed.chunks.local]
    alone = [plan_of_layers(section, list(own), [own]) for own in placed.chunks.layers]
    assert all(each < kept_by(alone[chunk], chunk) for each, chunk in zip(kept, placed.chunks.local, strict=True))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_forward_pass_makes_the_head_s_gradient(micro_batches: int) -> None:
    recipe, config = recipe_of(None, "none"), read_config_values(MODEL)
    (cost,), peak = costs_of(recipe, config), measured(recipe, config, 0, micro_batches)
    expected = walked(None, micro_batches, [cost])[0].peak
    assert 0.97 <= expected / peak <= 1.03, f"{expected / peak:.3f}"
    without = walked(None, micro_batches, [replace(cost, gradients_of_forward=0)])[0].peak
    assert without / peak < 0.95, "control"
