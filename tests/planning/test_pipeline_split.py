"""Layers of each chunk of a pipeline: even, by cost, by hand; and what cannot be split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders.small_config import small_config
from builders.small_experts import KINDS, experts_config

from danlu.models.config import ModelConfig
from danlu.planning.pipeline_split import chunk_sizes, layer_costs, pipedream_problems, split_problems
from danlu.recipe import Recipe
from danlu.recipe.sections import BatchSize, Data, Lora, Model, Parallel, Pipeline, Source


def config_of(layers: int, *, wide: Sequence[int] = (), **changes: int) -> ModelConfig:
    """wide: layers whose feed-forward network is eight times as wide."""
    config = small_config(layers=layers, **changes)
    specs = [
        replace(spec, feed=replace(spec.feed, intermediate_size=8 * 48)) if number in wide else spec  # type: ignore[call-arg]
        for number, spec in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(specs))


def test_even_chunks_differ_by_one_layer_at_most_and_the_first_ones_are_larger() -> None:
    assert chunk_sizes(Pipeline(stages=2), config_of(4)) == [2, 2]
    assert chunk_sizes(Pipeline(stages=4), config_of(10)) == [3, 3, 2, 2]
    assert chunk_sizes(Pipeline(stages=2, schedule="interleaved"), config_of(5)) == [2, 1, 1, 1]
    assert chunk_sizes(Pipeline(stages=2, split=[3, 1]), config_of(4)) == [3, 1]


@pytest.mark.parametrize(("wide", "vocab_size"), [((0,), 61), ((3, 4), 61), ((), 4000), ((7,), 2000), ((2, 5), 900)])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_chunks_by_cost_are_the_best_of_all_splits(wide: Sequence[int], vocab_size: int, stages: int) -> None:
    config = config_of(8, wide=wide, vocab_size=vocab_size)
    costs, head = layer_costs(config), vocab_size * config.hidden_size

    def slowest(sizes: Sequence[int]) -> int:
        borders = list(itertools.accumulate(sizes, initial=0))
        of_chunks = [sum(costs[start:stop]) for start, stop in itertools.pairwise(borders)]
        return max(*of_chunks[:-1], of_chunks[-1] + head)

    sizes = chunk_sizes(Pipeline(stages=stages, split="cost"), config)
    every = [cut for cut in itertools.product(range(1, 9), repeat=stages) if sum(cut) == 8]
    assert sum(sizes) == 8 and slowest(sizes) == min(map(slowest, every))
    if stages == 2 and wide == ():  # control: half of the layers beside a large head are not
        assert slowest(sizes) < slowest(chunk_sizes(Pipeline(stages=stages), config))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Pipeline(stages=8), "8 stages are 8 chunks, and the model has 4 layers. Use at most 4 stages"),
        (
            Pipeline(stages=4, schedule="interleaved"),
            "4 stages with 2 chunks each are 8 chunks, and the model has 4 layers. Use at most 2 stages",
        ),
        (Pipeline(stages=2, split=[2, 1, 1]), "split: 3 numbers, and there are 2 chunks. Give one for each"),
        (Pipeline(stages=2, split=[3, 2]), "split: 5 layers in all, and the model has 4"),
        (Pipeline(stages=2, chunks=2), "chunks: 2, but 1f1b has 1 on each rank. Use 1, or interleaved"),
    ],
)
def test_what_cannot_be_split_is_told(section: Pipeline, message: str) -> None:
    assert [problem for problem in split_problems(section, config_of(4)) if message in problem]
    assert not list(split_problems(Pipeline(stages=2), config_of(4)))


def test_what_pipedream_cannot_update_stage_by_stage_is_told() -> None:
    tied, untied = (config_of(4, tie_word_embeddings=tie) for tie in (True, False))
    recipe = Recipe(
        stage="sft",
        model=Model(path="base"),
        data=Data(train=[Source(path="a.json")]),
        batch=BatchSize(sequences=2),
        parallel=Parallel(pipeline=Pipeline(stages=2, schedule="pipedream")),
        output="runs/x",
    )
    (of_tie,) = pipedream_problems(recipe, tied)
    assert "this model's embedding is its head too, on the first and on the last stage" in of_tie
    assert not [*pipedream_problems(recipe, untied)]
    assert not [*pipedream_problems(recipe.model_copy(update={"adapter": Lora()}), tied)]  # it trains neither
    (of_experts,) = pipedream_problems(recipe, experts_config(KINDS["mixtral"], tie_word_embeddings=False))
    assert "the load of experts is counted and balanced by steps" in of_experts
    synchronous = recipe.model_copy(update={"parallel": Parallel(pipeline=Pipeline(stages=2))})
    assert not [*pipedream_problems(synchronous, tied)]  # control
