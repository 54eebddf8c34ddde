"""The expected memory of a training step, by part, before there is one; and the micro-batch that fits.

A run estimates with the model that it has placed; `danlu preview` from a config alone (`memory_preview`). Parameters
are counted byte by byte, activations and logits by the formulas of `planning.activation_memory`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import nn

from danlu.core.dtensor import is_dtensor, local_tensor
from danlu.core.errors import ModelError, RecipeError
from danlu.core.types import MemoryParts
from danlu.memory.available_memory import available_bytes, host_memory_bytes
from danlu.memory.layer_plan import Kind, LayerPlan
from danlu.models.attention_kernels import kernels_of
from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.numerics.dtypes import DTYPES
from danlu.planning.activation_memory import least_weight_bytes
from danlu.planning.batch_shape import Kernels
from danlu.planning.step_estimate import StepEstimate
from danlu.recipe import Recipe
from danlu.recipe.device_map import ByHand, named_devices
from danlu.training.units import format_bytes

# More tokens at once make CPU steps no faster (measured from 1024 to 8192), only larger.
MAX_CPU_TOKENS = 4096
_FREE_SHARE = 0.8
"""The share that `batch.micro: auto` gives to activations of the free memory that the rest of a step leaves."""
_FLOAT32 = 4


def check_size(recipe: Recipe, config: ModelConfig, where: str, processes: int) -> None:
    """Refuses a model with weights that alone do not fit into this machine, before anything is made of it.

    where: the model's name in the message. Raises ModelError. Training needs many times more than the weights, which
    `MemoryEstimate.lines` reports.
    """
    offload = recipe.memory.offload
    if "parameters" in offload and recipe.memory.folder is not None:
        return
    need = least_weight_bytes(recipe, config, processes)
    on_gpu = recipe.device != "cpu" and torch.cuda.is_available() and "parameters" not in offload
    if recipe.parallel.device_map is not None:
        room, machine = _room_of_devices(recipe.parallel.device_map, on_gpu=on_gpu)
    elif on_gpu:
        room, machine = torch.cuda.get_device_properties(0).total_memory, "this GPU has"
    else:
        room, machine = host_memory_bytes(), "this machine has"
    if room is not None and need > room:
        name, size = config.largest_size
        raise ModelError(
            f"{where}: a model of {config.parameter_count():,} parameters: its weights alone take "
            f"{need / 2**30:,.1f} GiB here; {machine} {room / 2**30:,.1f} GiB. Take a smaller one (the "
            f"largest of its sizes is {name}, {size:,}), share it among more processes (parallel.shard: zero3), or "
            "train an adapter on a quantized base"
        )


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


@dataclass(frozen=True)
class MemoryEstimate(StepEstimate):
    """The expected memory of a step of one process, and how much this machine has for it."""

    _: KW_ONLY
    offloaded_bytes: int = 0
    """Bytes that `memory.offload` keeps in the host's memory or in files."""
    processes: int = 1
    device: str = ""
    """The device that this is about, with the layers on it, where a model lies on several devices."""
    by_device: tuple[MemoryEstimate, ...] = ()
    """The estimate of each device of such a model."""

    @property
    def resident_bytes(self) -> int:
        """Bytes that a model takes as soon as it is placed."""
        return self.parts.weights + self.parts.adapter

    def available(self, resident_bytes: int) -> int | None:
        """Bytes that tensors of one process may take; None where the system does not tell.

        resident_bytes: bytes that its tensors take already. Processes of one machine share the host's memory, not
        devices.
        """
        device = torch.device(self.device or self.device_type)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            return None  # of another machine
        free = available_bytes(device)
        if free is None:
            return None
        return resident_bytes + (free if self.device_type == "cuda" else free // processes_here(self.processes))

    def lines(self, available: int | None) -> list[str]:
        """Lines for the console: the parts, and advice where they are more than the available memory.

        available: bytes that tensors may take, those of the model included; None where it is not known.
        """
        each = f" on {self.device}" if self.device else " in each process" if self.processes > 1 else ""
        parts = " + ".join(f"{name} {format_bytes(value)}" for name, value in vars(self.parts).items() if value)
        of = f"micro-batches of {self.micro} x {self.recipe.data.max_length} tokens"
        lines = [f"memory expected{each}: {parts} = {format_bytes(self.parts.total)} in tensors, for {of}"]
        if self.offloaded_bytes:
            offloaded = format_bytes(self.offloaded_bytes)
            lines.append(f"memory expected{each}: {offloaded} more wait where memory.offload says")
        if available is not None and self.parts.total > available:
            from danlu.planning.memory_advice import advice

            what_to_set = advice(self.recipe, vars(self.parts), device_type=self.device_type, micro=self.micro)
            lines.append(
                f"memory: {format_bytes(self.parts.total)}{each} are more than the {format_bytes(available)} that are "
                f"free. {what_to_set}"
            )
        return lines


@dataclass(frozen=True)
class BytesByDevice:
    """The bytes of a model's parts on each device."""

    weights: Counter[str] = field(default_factory=Counter)
    """Bytes of all models, with adapters."""
    adapter: Counter[str] = field(default_factory=Counter)
    """Bytes of the adapter that is trained."""
    trained: Counter[str] = field(default_factory=Counter)

    def part_of(self, parts: MemoryParts, device: str) -> MemoryParts:
        """One device's part of `parts` of all devices together, without activations and logits."""
        weights, adapter, trained = (
            counted[device] / max(1, counted.total())
            for counted in (self.weights - self.adapter, self.adapter, self.trained)
        )
        return replace(
            parts,
            weights=round(weights * parts.weights),
            adapter=round(adapter * parts.adapter),
            gradients=round(trained * parts.gradients),
            optimizer=round(trained * parts.optimizer),
            average=round(trained * parts.average),
            activations=0,
            logits=0,
        )


def with_devices(estimate: MemoryEstimate, device_map: DeviceMap, counted: BytesByDevice) -> MemoryEstimate:
    """The estimate of a model that lies on several devices, with that of each."""
    by_device = []
    for device in device_map.devices:
        layers = device_map.layers_on(device)
        plan = [entry for entry in estimate.plan if entry.layer in layers]
        if not layers:  # embedding or head alone, which keep what a recomputed layer does: hidden states
            layers, plan = [0], [LayerPlan(0, "full")]
        own = replace(
            estimate,
            config=replace(estimate.config, layers=tuple(estimate.config.layers[layer] for layer in layers)),
            parts=counted.part_of(estimate.parts, device),
            plan=plan,
            training=tuple(estimate.training[layer] for layer in layers) if estimate.training else (),
            device_type=torch.device(device).type,
            kernels=kernels_name(torch.device(device).type),
            offloaded_bytes=estimate.offloaded_bytes * counted.trained[device] // max(1, counted.trained.total()),
            processes=1,
            critic=None,
            in_flight=1.0,
            device=device,
            has_head=device == device_map.head,
        )
        by_device.append(own.with_activations())
    return replace(estimate, by_device=tuple(by_device))


def expected_lines(estimate: MemoryEstimate, *, is_placed: bool) -> list[str]:
    """`MemoryEstimate.lines` of each device. is_placed: whether the model is there already."""
    each = estimate.by_device or (estimate,)
    return [line for own in each for line in own.lines(own.available(own.resident_bytes if is_placed else 0))]


def processes_here(world: int) -> int:
    """Processes of this run on this machine, as torch's launchers say; else all of them."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local_world_size) if local_world_size.isdigit() and int(local_world_size) else world


def find_micro_batch(estimate: MemoryEstimate, per_step: int, *, resident_bytes: int = 0) -> int:
    """Packed sequences in a micro-batch: as the recipe says, or the most that fit into memory.

    estimate: of a step with any micro-batch. per_step: packed sequences of a step on this data rank, the upper bound.
    resident_bytes: bytes of the estimate that this process's tensors take already.
    Raises RecipeError where `batch.memory` does not hold the smallest micro-batch, with the recomputation that would.
    """
    batch, length = estimate.recipe.batch, estimate.recipe.data.max_length
    if batch.micro != "auto":
        return min(batch.micro, per_step)
    if estimate.by_device:
        placed = [own.resident_bytes if resident_bytes else 0 for own in estimate.by_device]
        own_limits = zip(estimate.by_device, placed, strict=True)
        return min(find_micro_batch(own, per_step, resident_bytes=resident) for own, resident in own_limits)
    at_most = per_step if estimate.device_type != "cpu" else min(per_step, max(1, MAX_CPU_TOKENS // length))
    step = estimate.step_memory()
    if batch.memory is not None:
        if step.of_smallest > batch.memory * 2**30:
            smallest = "one packed sequence" if step.smallest == 1 else f"one row of {step.smallest} sequences"
            on = f" of {estimate.device}" if estimate.device else ""
            raise RecipeError(
                f"batch.memory: {batch.memory} GiB{on} do not hold {smallest}: weights, gradients, optimizer and "
                f"one of {step.smallest * length} tokens need about {step.of_smallest / 2**30:.2f} GiB. "
                f"{_what_would_fit(estimate, batch.memory * 2**30)}"
            )
        return step.largest_micro_batch(batch.memory * 2**30, at_most)
    available = estimate.available(resident_bytes)
    return at_most if available is None else step.largest_micro_batch(available, at_most, share=_FREE_SHARE)


def _what_would_fit(estimate: MemoryEstimate, available: float) -> str:
    """Advice for the smallest micro-batch that does not fit: the recomputation that costs least time, or more
    memory."""
    need = estimate.step_memory().of_smallest
    kinds: tuple[Kind, ...] = ("selective", "full")
    for kind in kinds:
        plan = [LayerPlan(layer, kind) for layer in range(len(estimate.config.layers))]
        with_kind = estimate.step_memory(plan).of_smallest
        if with_kind <= available and with_kind < need:
            return f"With memory: {{recompute: {kind}}} they need about {with_kind / 2**30:.2f} GiB; or give more."
    return "Give more, or lower data.max_length."


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


# ── parameters that are sharded ──


def gathered_parameters(model: nn.Module, recipe: Recipe) -> tuple[int, int]:
    """Returns (bytes of whole parameters, bytes of whole gradients besides those of shards) that a process of a sharded
    model has at a time."""
    shared = {name: parameter for name, parameter in model.named_parameters() if is_dtensor(parameter)}
    if not shared:
        return 0, 0
    from danlu.planning.gathered_memory import ShardedSizes, gathered_at_a_time

    sharded = {
        name: ShardedSizes(
            parameter.numel() * gathered_element_bytes(recipe, parameter),
            parameter.numel() * parameter.requires_grad,
            local_tensor(parameter).numel() * parameter.requires_grad,
        )
        for name, parameter in shared.items()
    }
    return gathered_at_a_time(sharded, recipe.parallel)


def gathered_element_bytes(recipe: Recipe, parameter: torch.Tensor) -> int:
    """Bytes of an element as FSDP2 gathers it: in the type of activations where all weights are trained."""
    narrow = recipe.adapter is None and parameter.is_floating_point()
    return activation_dtype(recipe.precision).itemsize if narrow else parameter.itemsize
