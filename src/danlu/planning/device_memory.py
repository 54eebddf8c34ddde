"""The memory of a step on each device that the layers of one process are dealt to. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from danlu.core.memory_parts import MemoryParts
from danlu.memory.layer_plan import LayerPlan
from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.optim.state_shapes import FLOAT32_BYTES
from danlu.parallel.schedules import unsplit
from danlu.planning.batch_shape import Kernels
from danlu.planning.chunk_memory import ChunkGradients
from danlu.planning.device_map import device_map_of
from danlu.planning.rank_memory import RankStates, chunks_step
from danlu.planning.step_plan import HostBytes, RankMemory
from danlu.planning.step_walk import RankCost, WalkBytes, walk
from danlu.planning.target import Target
from danlu.planning.workload import Workload


@dataclass(frozen=True)
class _BytesByDevice:
    """The bytes of the parts of the models on each device."""

    weights: Counter[str] = field(default_factory=Counter)
    """Bytes of all models, with adapters."""
    adapter: Counter[str] = field(default_factory=Counter)
    """Bytes of the adapter that is trained."""
    trained: Counter[str] = field(default_factory=Counter)
    """Bytes of the gradients of what is trained."""

    def part_of(self, parts: MemoryParts, device: str) -> MemoryParts:
        """One device's part of `parts` of all devices together."""
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
        )


def device_memory(
    workload: Workload, states: RankStates, target: Target, micro: int, micro_batches: int
) -> tuple[list[MemoryParts], list[RankMemory]]:
    """Returns for each device of the map what micro-batches do not change, and its memory at the peak of a step.

    states: of the process, all devices together. micro: packed sequences of a micro-batch.
    """
    device_map = _map_of(workload, target, workload.config)
    counted = _bytes_by_device(workload, target, device_map)
    fixed, memory = [], []
    for device in device_map.devices:
        parts = counted.part_of(states.parts, device)
        walked = _walked(workload, device_map, device, counted.trained[device], micro, micro_batches)
        share = counted.trained[device] / max(1, counted.trained.total())
        fixed.append(parts)
        memory.append(
            RankMemory(
                replace(
                    parts, activations=walked.activations, logits=walked.logits, gradients=walked.gradients, gathered=0
                ),
                states.by_role,
                host=HostBytes(loading=0, step=round(share * states.offloaded), saving=0),
                device=device,
            )
        )
    return fixed, memory


def _map_of(workload: Workload, target: Target, config: ModelConfig, head: str | None = None) -> DeviceMap:
    section = workload.recipe.parallel.device_map
    assert section is not None, "the recipe has a device map"
    return device_map_of(section, config, target.devices, loss_device=head)


def _bytes_by_device(workload: Workload, target: Target, device_map: DeviceMap) -> _BytesByDevice:
    """The bytes on each device of the policy and of frozen models."""
    counted, policy = _BytesByDevice(), workload.policy
    for each in (*policy.tensors, *policy.originals):
        counted.weights[device_map.of_parameter(each.name)] += each.bytes
    for model in workload.frozen:
        own = _map_of(workload, target, model.config, device_map.head)
        for each in model.tensors:
            counted.weights[own.of_parameter(each.name)] += each.bytes
    for each in policy.tensors:
        counted.trained[device_map.of_parameter(each.name)] += FLOAT32_BYTES * math.prod(each.shape) * each.trained
    if workload.recipe.adapter is not None:
        counted.adapter.update(counted.trained)
    return counted


def _walked(
    workload: Workload, device_map: DeviceMap, device: str, gradients: int, micro: int, micro_batches: int
) -> WalkBytes:
    """The bytes of one device at the peak of a step, as of a process with its layers alone."""
    device_type: str = device.partition(":")[0]
    kernels: Kernels = "cpu" if device_type == "cpu" else "flash"
    whole = chunks_step(workload, workload.chunks(0), device_type, kernels, micro)
    layers = device_map.layers_on(device)
    plan = [entry for entry in whole.plan if entry.layer in layers]
    if not layers:  # embedding or head alone, which keep what a recomputed layer does: hidden states
        layers, plan = [0], [LayerPlan(0, "full")]
    step = replace(
        whole,
        config=replace(whole.config, layers=tuple(whole.config.layers[layer] for layer in layers)),
        plan=plan,
        training=tuple(whole.training[layer] for layer in layers),
        critic=None,
        has_head=device == device_map.head,
    )
    cost = step.chunk_cost(_gradients(workload, device_map, device, gradients))
    (own,) = walk((unsplit(micro_batches),), [cost], (RankCost(),))
    return own.parts


def _gradients(workload: Workload, device_map: DeviceMap, device: str, total: int) -> ChunkGradients:
    """The gradients of the weights on one device."""
    config, trained = workload.config, workload.policy.trained
    embedding = FLOAT32_BYTES * math.prod(trained.get("embed_tokens.weight", (0,)))
    name = "lm_head.weight" if config.has_own_head else "embed_tokens.weight"
    head = FLOAT32_BYTES * math.prod(trained.get(name, (0,))) if config.task == "causal-lm" else 0
    return ChunkGradients(
        total,
        embedding if device == device_map.embed and not device.startswith("cpu") else 0,
        head if device == device_map.head else 0,
    )
