"""Sharded models whose shards wait in the host's memory, as one process of a group sees them.

The meta device stands for a GPU: what is on it is not in the host's memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from builders.parallel_steps import config_of
from danlu.assembly.parallelize import Placed, place, subject_of
from danlu.assembly.parameters import kept_whole
from danlu.models.attend import PackedAttention
from danlu.models.initialize import initial_value
from danlu.models.loading import meta_decoder
from danlu.parallel import data
from danlu.parallel.layout import layout_of
from danlu.parallel.local_parameter import local_parameters_of
from danlu.parallel.ranks import ranks_of
from danlu.recipe import Recipe, load

GPU, HOST = torch.device("meta"), torch.device("cpu")


def placed_on_gpu(file: str) -> dict[str, tuple[str, bool, bool]]:
    """Of each parameter of a model that is trained in full: where it is, whether it is a shard, and whether what is in
    the host's memory has its first values."""
    recipe = load(Path(file)).recipe
    placed = _place(recipe, GPU)
    held = placed.parallel.local_parameters
    config = placed.subject.model.config
    return {
        name: (
            one.local.device.type,
            one.local is not one.parameter,
            one.local.device == HOST and torch.equal(one.local, initial_value(config, name, one.box, recipe.seed)),
        )
        for name, one in held.items()
    }


def _place(recipe: Recipe, device: torch.device) -> Placed:
    ranks = ranks_of(layout_of(recipe.parallel, torch.distributed.get_world_size()), "cpu")
    return place(subject_of(recipe, config_of(recipe), device, ranks=ranks), recipe, ranks, device)


def shares_memory(file: str) -> list[str]:
    """Shards that FSDP2 gathers from other memory than the plain tensors that optimizers change, once it has run.

    In float32 on a CPU, with FSDP2 told to offload and all memory from `to_empty`.
    """
    recipe = load(Path(file)).recipe
    ranks = ranks_of(layout_of(recipe.parallel, torch.distributed.get_world_size()), "cpu")
    model = meta_decoder(config_of(recipe))
    sharder = data.Sharder(model, ranks, recipe.parallel, gathered=None, whole=kept_whole(model), offload=True)
    for name, layer in model.layers.items():
        sharder.layer(f"layers.{name}", layer)
    sharder.rest(list(model.layers.values()))
    data.to_empty(model, HOST, offload=True)
    held = local_parameters_of(model, ranks, {})
    for one in held.values():
        one.local.data.normal_()
    tokens = torch.arange(6)
    with torch.no_grad():
        model(tokens, tokens, PackedAttention((0, 6)))
    data.reshard(model)
    gathered = {name: one.to_local() for name, one in model.named_parameters() if isinstance(one, DTensor)}
    assert gathered
    return [name for name, one in gathered.items() if one.data_ptr() != held[name].local.data_ptr()]
