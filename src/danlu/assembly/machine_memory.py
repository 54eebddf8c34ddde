"""The memory of this machine for a run: what is free, how many processes share it, and models larger than it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from danlu.core.errors import ModelError
from danlu.memory.available_memory import available_bytes, host_memory_bytes
from danlu.models.attention_kernels import kernels_of
from danlu.models.config import ModelConfig
from danlu.numerics.dtypes import DTYPES
from danlu.parallel.layout import layout_of
from danlu.planning.batch_shape import Kernels
from danlu.recipe import Recipe
from danlu.recipe.device_map import ByHand, named_devices

if TYPE_CHECKING:
    from danlu.planning.cluster import Cluster

_FLOAT32 = 4


def check_size(recipe: Recipe, config: ModelConfig, where: str, processes: int) -> None:
    """Refuses a model with weights that alone do not fit into this machine, before anything is made of it.

    where: the model's name in the message. Raises ModelError. Training needs many times more than the weights, which
    the plan of the step tells.
    """
    offload = recipe.memory.offload
    if "parameters" in offload and recipe.memory.folder is not None:
        return
    on_gpu = recipe.device != "cpu" and torch.cuda.is_available() and "parameters" not in offload
    if recipe.parallel.device_map is not None:
        room, machine = _room_of_devices(recipe.parallel.device_map, on_gpu=on_gpu)
    elif on_gpu:
        room, machine = torch.cuda.get_device_properties(0).total_memory, "this GPU has"
    else:
        room, machine = host_memory_bytes(), "this machine has"
    if room is None or _FLOAT32 * config.parameter_count() <= room:  # however it is kept and shared
        return
    need = weight_bytes(recipe, config, processes)
    if need > room:
        name, size = config.largest_size
        raise ModelError(
            f"{where}: a model of {config.parameter_count():,} parameters: its weights alone take "
            f"{need / 2**30:,.1f} GiB here; {machine} {room / 2**30:,.1f} GiB. Take a smaller one (the "
            f"largest of its sizes is {name}, {size:,}), share it among more processes (parallel.shard: zero3), or "
            "train an adapter on a quantized base"
        )


def weight_bytes(recipe: Recipe, config: ModelConfig, processes: int) -> int:
    """Bytes of the base's weights on the process that has most of them, as the plan of a step counts them."""
    from danlu.assembly.policy_tensors import policy_tensors_of
    from danlu.planning.rank_memory import rank_states
    from danlu.planning.workload import Workload

    layout = layout_of(recipe.parallel, processes)
    workload = Workload(recipe, config, policy_tensors_of(recipe, config))
    states = (rank_states(workload, layout, stage=stage) for stage in range(layout.pipeline))
    return max(sum(each.bytes for each in own.tensors if not each.whole.of_adapter) for own in states)


def _room_of_devices(section: str | ByHand, *, on_gpu: bool) -> tuple[int | None, str]:
    """Returns (bytes of all memory of a map's devices, their description for a message); None where a size is
    unknown."""
    if isinstance(section, str):
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if on_gpu else ["cpu"]
    else:
        devices = list(named_devices(section))
    sizes = [
        host_memory_bytes() if device == "cpu" else torch.cuda.get_device_properties(device).total_memory
        for device in devices
    ]
    known = [size for size in sizes if size is not None]
    have = f"{' and '.join(sorted(devices))} {'has' if len(devices) == 1 else 'have'}"
    return sum(known) if len(known) == len(sizes) else None, have


def free_bytes(device: torch.device, world: int) -> int | None:
    """Bytes that tensors of one process may still take; None where the system does not tell.

    Processes of one machine share the host's memory, not devices. world: processes of the run.
    """
    free = available_bytes(device)
    return free if free is None or device.type == "cuda" else free // processes_here(world)


def processes_here(world: int) -> int:
    """Processes of this run on this machine, as torch's launchers say; else all of them."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local_world_size) if local_world_size.isdigit() and int(local_world_size) else world


def kernels_name(device_type: str) -> Kernels:
    """The attention kernels of a device.

    A GPU that this machine does not have counts as having the usual ones.
    """
    if device_type == "cpu":
        return "cpu"
    is_here = device_type == "cuda" and torch.cuda.is_available()
    return "document" if is_here and kernels_of(torch.device(device_type)).varlen is None else "flash"


def activation_dtype(precision: str) -> torch.dtype:
    """The type of activations; bf16 where `precision: auto` has not been measured yet."""
    return DTYPES["bf16" if precision == "auto" else precision]


def gathered_element_bytes(recipe: Recipe, parameter: torch.Tensor) -> int:
    """Bytes of an element as FSDP2 gathers it: in the type of activations where all weights are trained."""
    narrow = recipe.gathers_activation_type and parameter.is_floating_point()
    return activation_dtype(recipe.activations).itemsize if narrow else parameter.itemsize


def gpus_of_torch(device: torch.device, nodes: int, cards_per_node: int) -> Cluster:
    """The GPUs of this machine as torch sees them, for systems without nvidia-smi."""
    from danlu.planning.cards import Card, card_of_device
    from danlu.planning.cluster import Cluster

    name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    card = card_of_device(name) or Card(name, memory, None, {})
    return Cluster.of_card(replace(card, memory_bytes=memory), nodes, cards_per_node)
