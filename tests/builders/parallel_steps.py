"""A recipe's steps in some layout, as each process of a group sees them, and in one process."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from builders.tiny_run import SyntheticPacks
from builders.trees import trees_of
from danlu.assembly.parallelize import LayerPlacer
from danlu.core.types import Pack
from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import read_config
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.recipe import Recipe, load
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.trace import Trace, trace_training

LINEAR_ATTENTION: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        }
    }
}
"""Changes of a recipe: a model with linear attention, whose heads two and four ranks share out."""


def steps_of(count: int, packs: int) -> list[list[Pack]]:
    """Packs of a few steps; a step of any number of packs, so that processes have different shares."""
    source = SyntheticPacks()
    return [[source.at(step * packs + place) for place in range(packs)] for step in range(count)]


def config_of(recipe: Recipe) -> ModelConfig:
    if recipe.model.path is not None:
        return read_config(Path(recipe.model.path))
    assert isinstance(recipe.model.config, dict)
    return read_config_values({"vocab_size": 400, "tie_word_embeddings": False, **recipe.model.config})


def see(
    files: Sequence[str], packs: int, micro: int, world: int | None = None, *, rounded: bool = False
) -> dict[str, Trace]:
    """What this process sees of each recipe; alone where `world` is 1.

    What is compiled is traced, and run as it is: making code of it takes minutes. rounded: the trained weights start
    about one unit of float32's last place away, so that the trace shows the effect of rounding alone.
    """
    torch.set_num_threads(1)
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
        return {file: _see(file, steps_of(2, packs), steps_of(1, 3)[0], micro, world, rounded) for file in files}


def see_trees(
    files: Sequence[str], packs: int, micro: int, world: int | None = None, mistake: bool = False
) -> dict[str, Trace]:
    """The same of packs whose samples are trees; with a mistake, of what is left of them without branches."""
    torch.set_num_threads(1)
    *steps, held_out = trees_of(3, packs)
    if mistake:
        steps = [[Pack((replace(pack.samples[0], branches=(), facts={}),)) for pack in step] for step in steps]
        held_out = steps[0]
    return {file: _see(file, steps, held_out, micro, world) for file in files}


def see_without_sums(files: Sequence[str], packs: int, micro: int) -> dict[str, Trace]:
    """The same with a mistake: gradients that torch leaves to us are not summed. For a process that ends with it."""
    reduce_gradients = ParallelContext.reduce_gradients

    def without_sums(parallel: ParallelContext) -> None:
        reduce_gradients(replace(parallel, partial_gradients=()))

    ParallelContext.reduce_gradients = without_sums  # type: ignore[method-assign]
    return see(files, packs, micro)


def matrices_left(file: str) -> list[tuple[int, int]]:
    """Whole matrices of layers that are in memory while a frozen base is read: as each layer has come, and as it has
    been placed. For a process that ends with it."""
    place, matrices, found = LayerPlacer.layer_loaded, [], []

    def alive() -> int:
        gc.collect()
        return sum(ref() is not None for ref in matrices)

    def layer_loaded(placer: LayerPlacer, name: str) -> None:
        layer = placer.model.layers[name]
        matrices.extend(weakref.ref(one) for one in layer.parameters() if one.ndim == 2 and not one.requires_grad)
        come = alive()
        place(placer, name)
        found.append((come, alive()))

    LayerPlacer.layer_loaded = layer_loaded  # type: ignore[method-assign]
    recipe = load(Path(file)).recipe
    ranks = groups_of(layout_of(recipe.parallel, torch.distributed.get_world_size()))
    ProxyTraining(recipe, Proxy(config_of(recipe)), ranks, torch.device("cpu"), micro=1)
    return found


def _see(
    file: str,
    steps: list[list[Pack]],
    held_out: list[Pack],
    micro: int,
    world: int | None,
    rounded: bool = False,
) -> Trace:
    recipe = load(Path(file)).recipe
    layout = Layout() if world == 1 else layout_of(recipe.parallel, torch.distributed.get_world_size())
    ranks = groups_of(layout)
    learning = ProxyTraining(recipe, Proxy(config_of(recipe)), ranks, torch.device("cpu"), micro=micro)
    if rounded:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in learning.placed.parameters():
                parameter.mul_(1 + 2**-24 * torch.randn(parameter.shape, generator=generator))
    return trace_training(learning, learning.run(steps), len(steps), held_out)


@functools.cache
def groups_of(layout: Layout) -> Ranks:
    """Groups take longer to make than a tiny model to train; the recipes of one layout share them."""
    return ranks_of(layout, "cpu")


def recipe_file(world: Any, folder: Path, name: str, **changes: Any) -> str:
    return str(world.recipe(folder / name, folder / f"{name}.yaml", **changes))
