"""The memory of one process of a layout, by part, from configs alone. Imports no torch.

Parameters, gradients, optimizer state and gathered parameters are counted to the byte, as `assembly` and `optim`
allocate them; the activations of the chunks are those of `StepEstimate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from danlu.core.memory_parts import MemoryParts
from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig
from danlu.optim.state_shapes import FLOAT32_BYTES, average_bytes, optimizer_bytes
from danlu.parallel.layout import Layout
from danlu.parallel.schedules import peak_in_flight, schedule
from danlu.planning.batch_shape import ELEMENT_BYTES, Kernels
from danlu.planning.gathered_memory import ShardedSizes, gathered_at_a_time
from danlu.planning.layer_training import training_of_chunks
from danlu.planning.pipeline_split import num_chunks
from danlu.planning.rank_tensors import RankPlace, RankTensor
from danlu.planning.step_estimate import CriticPass, StepEstimate, stage_config
from danlu.planning.workload import Workload
from danlu.recipe import sections
from danlu.recipe.value import VALUE, value_share

if TYPE_CHECKING:
    from danlu.core.types import Role

_ROUND = 4
"""Micro-batches for each stage in a step that fills the pipeline."""


@dataclass(frozen=True)
class RankStates:
    """The bytes of a process that do not depend on its micro-batches."""

    parts: MemoryParts
    """All parts but activations and logits."""
    offloaded: int
    """Bytes that `memory.offload` keeps in the host's memory or in files."""
    by_role: Mapping[Role, int]
    """The bytes of each model's parameters and buffers."""
    tensors: tuple[RankTensor, ...] = ()
    """The policy's."""

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the trained parameters of the policy that the process has."""
        return {each.name: each.shape for each in self.tensors if each.whole.trained}


def rank_states(workload: Workload, layout: Layout, *, stage: int = 0, device_type: str = "cpu") -> RankStates:
    """The states of the process of a stage that has most: the first one of those with the largest shards."""
    # The last rank has the rest of the vocabulary; where a matrix is cut decides the size of its quantized blocks.
    is_packed = any(each.packed is not None for each in workload.policy.tensors)
    ranks = range(layout.tensor) if is_packed else sorted({0, layout.tensor - 1})
    by_rank = [_states(workload, layout, stage, rank, device_type) for rank in ranks]
    return max(by_rank, key=lambda states: states.parts.total)


def _states(workload: Workload, layout: Layout, stage: int, tensor_rank: int, device_type: str) -> RankStates:
    recipe, config, policy = workload.recipe, workload.config, workload.policy

    def place(of: ModelConfig) -> RankPlace:
        sharded = recipe.parallel.shard != "none"
        return RankPlace(layout, workload.chunks(stage, of), tensor_rank, sharded)

    own = list(place(config).tensors(policy.tensors, config))
    originals = list(replace(place(config), sharded=False).tensors(policy.originals, config))
    frozen = {model.role: list(place(model.config).tensors(model.tensors, model.config)) for model in workload.frozen}
    critic = (
        []
        if workload.critic is None
        else list(place(workload.critic).tensors(workload.critic_tensors, workload.critic))
    )
    trained = {each.name: each.shape for each in own if each.whole.trained}
    trained |= {f"{VALUE}.{each.name}": each.shape for each in critic}
    optimizer = optimizer_bytes(recipe.optimizer, trained, paged=is_paged(workload, device_type))
    average = average_bytes(trained.values()) if recipe.ema is not None else 0
    by_role = {
        "policy": _bytes(own) + _bytes(originals),
        **{role: _bytes(tensors) for role, tensors in frozen.items()},
        **({VALUE: _bytes(critic)} if critic else {}),
        **({"rewards": workload.reward_bytes} if workload.reward_bytes else {}),
    }
    adapter = sum(each.bytes for each in own if each.whole.of_adapter and each.whole.is_parameter)
    parts = MemoryParts(
        weights=sum(by_role.values()) - adapter,
        adapter=adapter,
        gradients=optimizer.gradients,
        optimizer=optimizer.resident,
        average=average,
        activations=0,
        logits=0,
    )
    offloaded = optimizer.state - optimizer.resident
    if is_on_host(workload, layout, device_type):
        offloaded += parts.total
        parts = replace(parts, weights=0, adapter=0, gradients=0, optimizer=0, average=0)
    gathered, gradients = gathered_bytes_of(workload, own)
    gathered += sum(gathered_bytes_of(workload, tensors)[0] for tensors in frozen.values())
    of_critic = gathered_bytes_of(workload, critic)
    parts = replace(
        parts,
        gradients=parts.gradients + gradients + of_critic[1],
        packed=_workspace_elements([*own, *(each for tensors in frozen.values() for each in tensors)], device_type)
        * ELEMENT_BYTES[recipe.activations]
        + _rounded_bytes(workload, own),
        gathered=gathered + of_critic[0],
        stash=_weight_delay(workload, stage) * FLOAT32_BYTES * sum(map(math.prod, trained.values())),
    )
    return RankStates(parts, offloaded, by_role, tuple(own))


def _bytes(tensors: Iterable[RankTensor]) -> int:
    return sum(each.bytes for each in tensors)


def moves_from_card(workload: Workload, device_type: str) -> bool:
    """Whether `memory.offload`, or a paged optimizer, moves something from a card to the host."""
    recipe = workload.recipe
    return device_type != "cpu" and (bool(recipe.memory.offload) or isinstance(recipe.optimizer, sections.PagedAdamW))


def is_paged(workload: Workload, device_type: str) -> bool:
    """Whether the optimizer's state lies in pages, of which one parameter's is on the device at a time."""
    recipe = workload.recipe
    leaves_device = device_type != "cpu" or recipe.memory.folder is not None
    return isinstance(recipe.optimizer, sections.PagedAdamW) or ("optimizer" in recipe.memory.offload and leaves_device)


def is_on_host(workload: Workload, layout: Layout, device_type: str) -> bool:
    """Whether shards of parameters lie in the host's memory."""
    recipe = workload.recipe
    is_shared = layout.data * layout.context > 1
    return "parameters" in recipe.memory.offload and device_type != "cpu" and is_shared


def gathered_bytes_of(workload: Workload, tensors: Sequence[RankTensor]) -> tuple[int, int]:
    """(bytes of whole parameters, bytes of whole gradients besides those of shards) that a process has at a time."""
    recipe = workload.recipe
    sharded = {}
    for each in tensors:
        if each.gathered is not None:
            is_narrow = recipe.gathers_activation_type and each.whole.packed is None
            element_bytes = ELEMENT_BYTES[recipe.activations] if is_narrow else each.element_bytes
            count = math.prod(each.gathered)
            trained = each.whole.trained
            sharded[each.name] = ShardedSizes(count * element_bytes, count * trained, math.prod(each.shape) * trained)
    return gathered_at_a_time(sharded, recipe.parallel)


def _workspace_elements(tensors: Sequence[RankTensor], device_type: str) -> int:
    """Numbers of the largest dense matrix that is made of a packed one; of experts on a GPU of all of a process."""
    counts = [0]
    for each in tensors:
        if each.whole.packed is not None:
            counts.append(math.prod(each.cut[-2:] if device_type == "cpu" else each.cut))
    return max(counts)


def _rounded_bytes(workload: Workload, tensors: Sequence[RankTensor]) -> int:
    """Bytes of the codes of weights that are trained for a format of few bits, and of one decoded matrix."""
    recipe = workload.recipe
    if (section := recipe.trained_quantization) is None:
        return 0
    from danlu.planning.rounded_weights import code_bytes, keeps_codes, rounded_linears, rounded_shapes

    shapes = [*rounded_shapes(tensors, rounded_linears(workload.config))]
    codes = sum(code_bytes(section, shape) for shape in shapes) if keeps_codes(recipe) else 0
    return codes + max(map(math.prod, shapes), default=0) * ELEMENT_BYTES[recipe.activations]


def _weight_delay(workload: Workload, stage: int) -> int:
    """The number of updates that a stage's weights lack when a micro-batch begins (PipeDream)."""
    section = workload.recipe.parallel.pipeline
    if section.stages == 1 or not section.updates_each_micro_batch:
        return 0
    return section.stages - 1 - (0 if section.vertical_sync else stage)


def chunks_step(
    workload: Workload, chunks: Chunks, device_type: str, kernels: Kernels, micro: int, *, chunk: int | None = None
) -> StepEstimate:
    """The activations and logits of a micro-batch in the local chunks, as if they were one behind the other.

    chunk: the one of them that it is of; None: all. Segments of `recompute: every` are as long as all of them say.
    """
    recipe, critic, plan = workload.recipe, None, workload.recompute(chunks)
    if chunk is not None:
        chunks = replace(chunks, local=(chunk,))
        plan = [entry for entry in plan if entry.layer in chunks.layers[chunk]]
    if value_share(recipe) in ("base", "none"):
        if workload.critic is None:
            critic = CriticPass(stage_config(workload.config, chunks), plan)
        else:
            own = workload.chunks(0, workload.critic)
            critic = CriticPass(stage_config(workload.critic, own), workload.recompute(own))
    return StepEstimate(
        recipe,
        stage_config(workload.config, chunks),
        plan=plan,
        micro=micro,
        device_type=device_type,
        kernels=kernels,
        critic=critic,
        has_head=chunks.has_last,
        training=training_of_chunks(workload.training, chunks, chunks.local),
        lengths=workload.row_lengths,
        rows=workload.row_batches,
    )


def micro_batches_in_flight(section: sections.Pipeline, stage: int) -> float:
    """The micro-batches that a stage keeps activations of at once, in a step that fills the pipeline."""
    if section.stages == 1:
        return 1.0
    per_rank = num_chunks(section) // section.stages
    lists = schedule(section.schedule, section.stages, per_rank, _ROUND * section.stages)
    return peak_in_flight(lists[stage]) / per_rank
