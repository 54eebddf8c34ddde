"""The devices of a run's model: where it is loaded, those of a device map, and those of replicas in one process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from danlu.core.errors import RecipeError
from danlu.memory.available_memory import available_bytes
from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.device_map import ByHand, named_devices
from danlu.recipe.value import value_adapter_folder

if TYPE_CHECKING:
    from danlu.planning.device_map import Device


def layer_by_layer(recipe: Recipe, ranks: Ranks) -> bool:
    """Whether a frozen base can be cut and sharded while it is read, so that no process (of several devices, none)
    ever has all of it.

    Adapters that are read (`model.adapters`, `value.model`) and measured plans of recomputation need a whole base.
    """
    section = recipe.parallel
    reads_adapters = bool(recipe.model.adapters) or value_adapter_folder(recipe) is not None
    shares_layers = ranks.pipeline.size > 1 or ranks.tensor.size > 1 or ranks.expert.size > 1
    shares_layers = shares_layers or section.device_map is not None
    is_divided = shares_layers or (section.shard != "none" and not ranks.dense_data.all.alone)
    return is_divided and not reads_adapters and recipe.memory.recompute.kind != "planned"


def loading_device(recipe: Recipe, ranks: Ranks, device: torch.device) -> torch.device:
    """The device on which a model is loaded: the host for a model with a device map that is not loaded layer by layer,
    since no device may have room for all of it."""
    is_divided = recipe.parallel.device_map is not None and not layer_by_layer(recipe, ranks)
    return torch.device("cpu") if is_divided else device


@cache
def visible_devices(device: str) -> tuple[Device, ...]:
    """The devices that a device map may deal layers to, with the memory that was free when this was first asked: the
    GPUs that torch sees, or the CPU.

    By the same numbers a model that follows the policy's weights lies where the policy does.

    device: `recipe.device`.
    """
    from danlu.planning.device_map import Device

    if device == "cpu" or not torch.cuda.is_available():
        return (Device("cpu", available_bytes(torch.device("cpu"))),)
    names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return tuple(Device(name, available_bytes(torch.device(name))) for name in names)


def check_devices(section: str | ByHand | None, device: str) -> None:
    """Raises RecipeError for a device map that names a GPU which torch does not see; device: `recipe.device`."""
    if section is None or isinstance(section, str):
        return
    seen = [each.name for each in visible_devices(device) if each.name != "cpu"]
    for name, key in named_devices(section).items():
        if name not in ("cpu", *seen):
            sees = f"{len(seen)} GPU{'' if len(seen) == 1 else 's'}" if seen else "no GPU"
            instead = f"Use {seen[-1]}" if seen else "Use cpu, or device_map: auto"
            raise RecipeError(f"parallel.device_map: {key!r} is on {name}, and torch sees {sees}. {instead}")


def device_map_of(
    section: Literal["auto", "balanced"] | ByHand | None,
    device: str,
    config: ModelConfig,
    loss_device: torch.device | str | None = None,
) -> DeviceMap | None:
    """The devices of a model's parts as `parallel.device_map` says it; None for a model on one device.

    device: `recipe.device`. loss_device: the device of its head, where another model has decided it.
    """
    if section is None:
        return None
    from danlu.planning import device_map

    name = None if loss_device is None else str(loss_device)
    return device_map.device_map_of(section, config, visible_devices(device), loss_device=name)


def replica_devices(count: int | Literal["auto"], device: torch.device) -> list[torch.device]:
    """The devices of data parallelism in one process: GPUs, or the CPU as often as `parallel.data` says (count).

    Raises RecipeError for more GPUs than torch sees.
    """
    if device.type == "cpu":
        return [device] * (2 if count == "auto" else count)
    gpus = torch.cuda.device_count()
    if count != "auto" and count > gpus:
        raise RecipeError(f"parallel.data: {count}, but torch sees {gpus} GPUs. Use {gpus} or less")
    return [torch.device("cuda", number) for number in range(gpus if count == "auto" else count)]
