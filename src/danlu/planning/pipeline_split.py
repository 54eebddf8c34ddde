"""The number of layers of each pipeline chunk: the same number, the same cost, or as in the recipe. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from danlu.models.config import ModelConfig
from danlu.parallel.schedules import chunks_per_rank, schedule_problems
from danlu.planning.flops import layer_flops
from danlu.recipe.sections import Pipeline, Recipe


def num_chunks(section: Pipeline) -> int:
    """Chunks of the whole model."""
    return section.stages * (section.chunks or chunks_per_rank(section.schedule))


def split_problems(section: Pipeline, config: ModelConfig) -> Iterator[str]:
    """Yields the reasons why the layers of a model cannot be split among the chunks of a pipeline."""
    if section.stages == 1:
        return
    layers, count = len(config.layers), num_chunks(section)
    key = "parallel.pipeline"
    if config.carries_values:
        yield (
            f"{key}: stages pass on the residual stream alone, and layers of this model read {config.carried}. Use "
            "parallel.tensor, or parallel.shard: zero3"
        )
        return
    per_stage = count // section.stages
    for argument, message in schedule_problems(section.schedule, section.stages, per_stage, 2 * section.stages):
        yield f"{key}.{argument}: {message}"
    if count > layers:
        most = layers // per_stage
        instead = f"Use at most {most} stages" if most > 1 else "Leave it out"
        each = f" with {per_stage} chunks each" if per_stage > 1 else ""
        yield f"{key}: {section.stages} stages{each} are {count} chunks, and the model has {layers} layers. {instead}"
    elif isinstance(section.split, list):
        if len(section.split) != count:
            yield f"{key}.split: {len(section.split)} numbers, and there are {count} chunks. Give one for each"
        elif sum(section.split) != layers:
            yield f"{key}.split: {sum(section.split)} layers in all, and the model has {layers}"


def pipedream_problems(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """Yields the reasons why a model cannot be trained by updates of each stage after each micro-batch, where a recipe
    asks for that."""
    if not recipe.parallel.pipeline.updates_each_micro_batch:
        return
    key, instead = "parallel.pipeline.schedule", "use 1f1b"
    if config.tie_word_embeddings and recipe.adapter is None:
        yield (
            f"{key}: pipedream updates each stage by itself, and this model's embedding is its head too, on the first "
            f"and on the last stage. Train an adapter, set tie_word_embeddings: false in a config of your own, or "
            f"{instead}"
        )
    if config.has_experts:
        yield (
            f"{key}: the load of experts is counted and balanced by steps, of which pipedream has several in flight. "
            f"Train a model without experts, or {instead}"
        )


def chunk_sizes(section: Pipeline, config: ModelConfig) -> list[int]:
    """Layers in each chunk of the whole model, first to last, which `split_problems` has nothing against."""
    layers, count = len(config.layers), num_chunks(section)
    if isinstance(section.split, list):
        return section.split
    if section.split == "even":
        return [layers // count + (chunk < layers % count) for chunk in range(count)]
    head = config.vocab_size * config.hidden_size
    return even_in_cost(layer_costs(config), [*[0] * (count - 1), head])


def layer_costs(config: ModelConfig) -> list[int]:
    """The cost of each layer's products: the number of weights that a token is multiplied with."""
    return [layer_flops(layer, config.hidden_size).weights for layer in config.layers]


def even_in_cost(costs: Sequence[int], extras: Sequence[int], shares: Sequence[float] | None = None) -> list[int]:
    """The sizes of runs of layers, none empty, such that the most expensive run is as cheap as can be.

    extras: for each run, the cost in addition to its layers. shares: for each run, the divisor of its cost before it is
    compared; by default 1. Of equal splits, the one with fewer layers in earlier runs.
    """
    before = list(itertools.accumulate(costs, initial=0))
    count = len(extras)
    # By the number of layers in the first runs: (greatest cost of a run, their sizes).
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}
    for run, extra in enumerate(extras):
        after: dict[int, tuple[float, list[int]]] = {}
        for stop in range(run + 1, len(costs) - (count - 1 - run) + 1):
            after[stop] = min(
                (max(greatest, _cost(before[stop] - before[start] + extra, shares, run)), [*sizes, stop - start])
                for start, (greatest, sizes) in best.items()
                if start < stop
            )
        best = after
    return best[len(costs)][1]


def _cost(cost: int, shares: Sequence[float] | None, run: int) -> float:
    return cost if shares is None else cost / shares[run]
