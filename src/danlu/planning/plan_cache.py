"""Results that plans of one workload in several layouts share: states of stages, bytes of chunks, seconds of layers.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from danlu.models.chunks import Chunks
from danlu.parallel.collective_traffic import BUCKET_BYTES
from danlu.parallel.layout import Layout
from danlu.planning.chunk_costs import LayerTimes, chunk_bytes
from danlu.planning.primitives import OperationWork, PassSeconds
from danlu.planning.rank_memory import RankStates, moves_from_card, rank_states
from danlu.planning.rank_tensors import RankTensor
from danlu.planning.stage_kinds import StageKinds
from danlu.planning.step_walk import ChunkCost
from danlu.planning.step_work import clip_work, update_work
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe.sections import Parallel


@dataclass
class StageStates:
    """The states of a stage, and of all that are alike."""

    chunks: Chunks
    """Those of the first such stage, which tensors and layers are numbered by."""
    states: RankStates
    update: PassSeconds
    """The seconds of clipping and of the optimizer's step."""
    costs: dict[Hashable, ChunkCost] = field(default_factory=dict)
    """The bytes of its chunks, by what they depend on."""
    copied: dict[Hashable, int] = field(default_factory=dict)
    """The bytes that their passes copy to the host, by what they depend on."""


class PlanCache:
    """Computes each of these once.

    It is for workloads that differ in nothing but `parallel`, `batch.micro`, `memory.offload` and the kind of
    `memory.recompute`.
    """

    def __init__(self, workload: Workload, target: Target, times: LayerTimes | None = None) -> None:
        """times: known seconds of layers; None: those at the target's speeds, where it has them."""
        if times is None:
            speeds = target.training_speeds(compiled=workload.recipe.compile)
            times = None if speeds is None else LayerTimes(speeds)
        self.times = times
        self._target, self.kinds = target, StageKinds(workload)
        self._stages: dict[Hashable, StageStates] = {}

    def stage_of(self, workload: Workload, layout: Layout, stage: int) -> StageStates:
        """The states of a stage; those of stages that are alike are one object."""
        section = workload.recipe.parallel
        inside = replace(layout, pipeline=1), section.shard, section.prefetch, section.reduces_each_micro_batch
        key = self.kinds.of_stage(workload, stage), inside, tuple(workload.recipe.memory.offload)
        if key not in self._stages:
            self._stages[key] = self._states_of(workload, layout, stage)
        return self._stages[key]

    def _states_of(self, workload: Workload, layout: Layout, stage: int) -> StageStates:
        device_type = self._target.device_type
        states = rank_states(workload, layout, stage=stage, device_type=device_type)
        update, recipe = PassSeconds(), workload.recipe
        if self.times is not None:
            work = [update_work(recipe.optimizer, states.trained, device_type)]
            if recipe.gradient_clipping is not None:
                work.append(clip_work(sum(map(math.prod, states.trained.values()))))
            if recipe.trained_quantization is not None:
                work.append(_encoding_work(workload, states))
            update = PassSeconds.of(work, self.times.speeds)
            if moves_from_card(workload, device_type):
                from danlu.planning.offload_seconds import update_seconds  # here: few recipes offload

                update = update_seconds(workload, layout, states, work, update, self._target.cluster.card)
        return StageStates(workload.chunks(stage), states, update)

    def costs_of(self, workload: Workload, layout: Layout, stage: StageStates, micro: int) -> list[ChunkCost]:
        """The bytes of the micro-batch that takes most, in each chunk of a stage."""
        recipe, chunks = workload.recipe, stage.chunks
        section, recompute = recipe.parallel, recipe.memory.recompute
        settings = (
            *(micro, section.sequence, section.context, section.accumulate, section.reduce),
            *(recompute.kind, recompute.layers),
        )
        costs, tensors = [], dict[int, list[RankTensor]]()
        for chunk in chunks.local:
            chosen = tuple(workload.planned_kinds[layer] for layer in chunks.layers[chunk] if workload.planned_kinds)
            key = self.kinds.of_chunk(chunks, chunk), chosen, settings
            if key not in stage.costs:
                tensors = tensors or _by_chunk(stage.states.tensors, chunks)
                cost = chunk_bytes(workload, chunks, chunk, micro, self._target, tensors[chunk])
                stage.costs[key] = replace(cost, reduce_buffer=_reduce_buffer(section, layout, cost.gradients))
            costs.append(stage.costs[key])
        return costs

    def copied_of(self, workload: Workload, stage: StageStates, micro: int) -> list[int]:
        """The bytes that a micro-batch's passes through each chunk of a stage send to the host and back."""
        from danlu.planning.offload_seconds import kept_bytes

        section, recompute = workload.recipe.parallel, workload.recipe.memory.recompute
        settings = micro, section.sequence, section.context, recompute.kind, recompute.layers
        copied = []
        for chunk in stage.chunks.local:
            key = self.kinds.of_chunk(stage.chunks, chunk), settings
            if key not in stage.copied:
                stage.copied[key] = kept_bytes(workload, stage.chunks, chunk, micro, self._target)
            copied.append(stage.copied[key])
        return copied


def _encoding_work(workload: Workload, states: RankStates) -> OperationWork:
    """The work of encoding weights that are trained for a format of few bits, once an update."""
    from danlu.planning.rounded_weights import encoding, keeps_codes, rounded_linears, rounded_shapes

    shapes = rounded_shapes(states.tensors, rounded_linears(workload.config)) if keeps_codes(workload.recipe) else ()
    return OperationWork("encode", "update", tuple(encoding(math.prod(shape)) for shape in shapes))


def _by_chunk(tensors: Iterable[RankTensor], chunks: Chunks) -> dict[int, list[RankTensor]]:
    """The parameters that are counted with each chunk of a stage; those that its chunks share with the first."""
    of_layer = {layer: chunk for chunk in chunks.local for layer in chunks.layers[chunk]}
    by_chunk: dict[int, list[RankTensor]] = {chunk: [] for chunk in chunks.local}
    for each in tensors:
        layer = each.whole.layer
        chunk = chunks.of_parameter(each.name) if layer is None else of_layer[layer]
        by_chunk.get(chunk, by_chunk[chunks.local[0]]).append(each)
    return by_chunk


def _reduce_buffer(section: Parallel, layout: Layout, gradients: int) -> int:
    """Bytes that the sum of a chunk's gradients over data ranks copies them to (`parallel.gradient_buckets`): one
    bucket at a time, or all of them in half precision."""
    if section.shard != "none" or layout.data * layout.context == 1:
        return 0
    return gradients // 2 if section.reduce == "bf16" else min(gradients, BUCKET_BYTES)
