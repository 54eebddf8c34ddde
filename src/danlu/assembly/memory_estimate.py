"""The expected memory of a training step, by part, before there is one; and the micro-batch that fits.

A run estimates with the model that it has placed; `danlu preview` from a config alone (`memory_preview`). Parameters
are counted byte by byte, activations and logits by the formulas of `planning.activation_memory`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from danlu.core.dtensor import is_dtensor
from danlu.core.errors import ModelError, RecipeError
from danlu.core.types import MemoryParts
from danlu.memory.available_memory import available_bytes, host_memory_bytes
from danlu.memory.layer_plan import Kind, LayerPlan
from danlu.models.attention_kernels import kernels_of
from danlu.models.chunks import Chunks, DeviceMap
from danlu.models.config import ModelConfig
from danlu.models.kernel_limits import SHORT_DOCUMENT
from danlu.numerics.dtypes import DTYPES
from danlu.objectives.loss_memory import slice_bytes, workspace_bytes
from danlu.planning.activation_memory import (
    ActivationBytes,
    ActivationPlan,
    LayerPass,
    StepMemory,
    activation_bytes,
    gathered_bytes,
    least_weight_bytes,
)
from danlu.planning.batch_shape import BatchShape, Document, DocumentRun, Kernels, RankShare
from danlu.planning.layer_training import layers_training
from danlu.recipe import Recipe
from danlu.recipe.device_map import ByHand, named_devices
from danlu.recipe.sections import Parallel
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


class CriticPass(NamedTuple):
    """A second pass with gradients, of a model of values."""

    config: ModelConfig
    plan: Sequence[LayerPlan]


@dataclass(frozen=True)
class MemoryEstimate:
    """The expected memory of a step of one process."""

    recipe: Recipe
    config: ModelConfig
    """The model; for a stage of a pipeline, with the layers that it has."""
    parts: MemoryParts
    """Bytes on the device that computes; activations and logits are added by `with_activations`."""
    _: KW_ONLY
    plan: Sequence[LayerPlan]
    """The recomputation of each layer; empty where it is not known (`recompute: planned`, before layers are
    measured)."""
    micro: int
    """Packed sequences of full length in a micro-batch."""
    device_type: str
    offloaded_bytes: int = 0
    """Bytes that `memory.offload` keeps in the host's memory or in files."""
    processes: int = 1
    critic: CriticPass | None = None
    """The pass of a value model, with activations that are kept together with the policy's."""
    in_flight: float = 1.0
    """The number of micro-batches that a stage of a pipeline keeps activations of at once."""
    device: str = ""
    """The device that this is about, with the layers on it, where a model lies on several devices."""
    has_head: bool = True
    """Whether the loss is computed there."""
    lengths: np.ndarray | None = field(default=None, compare=False)
    """[rows] int: tokens of each row that is trained on; None where rows are not known."""
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

    def with_activations(self) -> MemoryEstimate:
        """The estimate with activations and logits, where `parts` has what does not depend on the data."""
        sequences = max(self.micro, self._most_paths)
        logits = self._loss_workspace(sequences) + self._head_copy
        activations = self._activations(sequences).peak(logits) - logits
        return replace(self, parts=replace(self.parts, activations=activations, logits=logits))

    def step_memory(self, plan: Sequence[LayerPlan] | None = None) -> StepMemory:
        """The same by how it grows with the micro-batch; plan: in place of the recipe's own."""
        return StepMemory(
            fixed=self.parts.total - self.parts.activations - self.parts.logits + self._head_copy,
            activations=self._activations(1, plan),
            loss_workspace=self._loss_workspace(1),
            max_loss_workspace=slice_bytes(self.device_type),
            smallest=self._most_paths,
        )

    @property
    def _most_paths(self) -> int:
        """Paths of `data.max_length` tokens that the longest item has: a row with two answers is never cut in two."""
        return 2 if self.recipe.row_type == "preference" or self.recipe.needs_mismatched else 1

    def _activations(self, sequences: int, plan: Sequence[LayerPlan] | None = None) -> ActivationBytes:
        """Bytes of a micro-batch; with a critic both passes have their activations when the backward pass begins.

        plan: in place of the recipe's own.
        """
        activations = self._pass_activations(sequences, self.config, self.plan if plan is None else plan)
        if self.critic is None:
            return activations
        is_alike = plan is not None and len(plan) == len(self.critic.config.layers)
        critic_plan = plan if plan is not None and is_alike else self.critic.plan
        own = self._pass_activations(sequences, self.critic.config, critic_plan)
        return ActivationBytes(activations.kept + own.kept, max(activations.recomputed, own.recomputed))

    def _pass_activations(self, sequences: int, config: ModelConfig, plan: Sequence[LayerPlan]) -> ActivationBytes:
        """Bytes of one model's pass over the micro-batch that takes the most."""
        section, memory, device_type = self.recipe.parallel, self.recipe.memory, self.device_type
        training = layers_training(self.recipe, config)
        kinds = [(layer.kind, layer.segment) for layer in plan] or [("none", None)] * len(config.layers)
        settings = ActivationPlan(
            layers=[LayerPass(*kind, own) for kind, own in zip(kinds, training, strict=True)],
            offload="activations" in memory.offload and (device_type != "cpu" or memory.folder is not None),
            in_flight=device_type != "cpu",
            share=RankShare(section.tensor, section.sequence),
        )
        element_bytes = activation_dtype(self.recipe.precision).itemsize
        kernels = kernels_name(device_type)
        activations = max(
            (
                activation_bytes(config, BatchShape(documents, element_bytes, kernels), settings)
                for documents in self._documents(sequences)
            ),
            key=lambda mix: mix.peak(0),
        )
        if self.in_flight != 1:
            activations = replace(activations, kept=round(self.in_flight * activations.kept))
        budget = memory.recompute.budget
        if budget is None or plan:
            return activations
        # Which layers recompute is found once they are measured; the plan then keeps to its budget.
        return ActivationBytes(min(activations.kept, int(budget * 2**30)))

    def _documents(self, sequences: int) -> list[tuple[Document, ...]]:
        """The documents of the micro-batches that may take the most: the longest rows, and the longest rows that keep
        probabilities, where longer ones leave them to a kernel.
        """
        length = self.recipe.data.max_length
        mixes = [tuple(map(_document, self._longest(sequences, length)))]
        if self.device_type == "cpu":
            is_pair = self._most_paths == 2
            # A row with two answers that are as long as the prompt is a stem and two branches of a third each, and a
            # branch keeps probabilities of its whole path.
            short = SHORT_DOCUMENT * 3 // 2 if is_pair else SHORT_DOCUMENT
            rows = self._longest(sequences, short, short)
            mixes.append(tuple(map(_pair if is_pair else _document, rows)))
        return [mix for mix in mixes if mix]

    def _longest(self, sequences: int, length: int, most: int | None = None) -> list[int]:
        """Documents of at most `length` tokens that fill the micro-batch, of the longest rows of at most `most` tokens.

        A longer row is cut: into packed sequences, or one with two answers into as many paths.
        """
        tokens = sequences * self.recipe.data.max_length
        whole, rest = -(-tokens // length), np.zeros(0, dtype=np.int64)
        if self.lengths is not None:
            rows = self.lengths if most is None else self.lengths[self.lengths <= most]
            whole, rest = min(whole, int((rows // length).sum())), rows % length
        documents = np.concatenate([np.full(whole, length), -np.sort(-rest[rest > 0])])
        before = np.cumsum(documents) - documents
        documents = np.minimum(documents, tokens - before)[before < tokens]
        return [int(each) for each in documents]

    def _loss_workspace(self, sequences: int) -> int:
        """Bytes that the fused head and loss take in addition to their inputs, if every token is trained."""
        recipe, config = self.recipe, self.config
        if not self.has_head or config.task != "causal-lm":
            return 0
        return workspace_bytes(
            sequences * recipe.data.max_length,
            config.hidden_size,
            config.vocab_size // recipe.parallel.tensor,
            element_bytes=activation_dtype(recipe.precision).itemsize,
            device_type=self.device_type,
            frozen=recipe.adapter is not None,
        )

    @property
    def _head_copy(self) -> int:
        """Bytes of the matrix that `Decoder.head_weight` makes of a head with a bias, and of its gradient."""
        recipe, config = self.recipe, self.config
        if not (self.has_head and config.has_own_head and config.head_bias):
            return 0
        matrix = config.vocab_size // recipe.parallel.tensor * config.hidden_size
        return matrix * (2 * _FLOAT32 if recipe.adapter is None else activation_dtype(recipe.precision).itemsize)


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
            device_type=torch.device(device).type,
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


def stage_config(config: ModelConfig, chunks: Chunks) -> ModelConfig:
    """The config of a model with the layers of one stage of a pipeline alone."""
    if chunks.last == 0:
        return config
    return replace(config, layers=tuple(config.layers[layer] for layer in chunks.local_layers))


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


def _document(tokens: int) -> Document:
    return (DocumentRun(tokens),)


def _pair(tokens: int) -> Document:
    """A prompt and two answers, all of one length."""
    third = max(1, tokens // 3)
    return DocumentRun(third), DocumentRun(third, third), DocumentRun(third, third)


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
    """Returns (bytes of whole parameters, bytes of whole gradients) that a process of a sharded model has at a time."""
    return gathered_at_a_time(
        {
            name: (
                parameter.numel() * gathered_element_bytes(recipe, parameter),
                parameter.numel() * parameter.requires_grad,
            )
            for name, parameter in model.named_parameters()
            if is_dtensor(parameter)
        },
        recipe.parallel,
    )


def gathered_element_bytes(recipe: Recipe, parameter: torch.Tensor) -> int:
    """Bytes of an element as FSDP2 gathers it: in the type of activations where all weights are trained."""
    narrow = recipe.adapter is None and parameter.is_floating_point()
    return activation_dtype(recipe.precision).itemsize if narrow else parameter.itemsize


def gathered_at_a_time(sharded: Mapping[str, tuple[int, int]], section: Parallel) -> tuple[int, int]:
    """Computes `gathered_parameters` from a mapping; sharded: a parameter's name to its gathered bytes and trained
    elements."""
    if not sharded:
        return 0, 0
    by_layer: dict[str, list[tuple[int, int]]] = {}
    for name, sizes in sharded.items():
        parts = name.split(".")
        by_layer.setdefault(parts[1] if parts[0] == "layers" else "", []).append(sizes)
    outside = by_layer.pop("", [])
    layers = [[sum(column) for column in zip(*sizes, strict=True)] for sizes in by_layer.values()]
    gathered = gathered_bytes(
        [sizes[0] for sizes in layers], sum(size for size, _ in outside), shard=section.shard, prefetch=section.prefetch
    )
    trained = [sizes[1] for sizes in layers] + [sum(count for _, count in outside)]
    # Whole gradients wait for the last micro-batch, or for the reduction of one layer after the other.
    return gathered, _FLOAT32 * (max(trained) if section.reduces_each_micro_batch else sum(trained))
