"""Chunks and stages of a pipeline that are alike: with layers of the same kinds in the same places. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig
from danlu.planning.model_tensors import ModelTensor
from danlu.planning.workload import Workload


class StageKinds:
    """The kinds of a workload's layers, which do not depend on how they are divided."""

    def __init__(self, workload: Workload) -> None:
        policy = [*workload.policy.tensors, *workload.policy.originals]
        self.of_policy = _layer_kinds(workload.config, policy, workload.training)
        """The number of the kind of each layer."""
        others = [(model.config, model.tensors) for model in workload.frozen]
        if workload.critic is not None:
            others.append((workload.critic, workload.critic_tensors))
        self._others = [(config, _layer_kinds(config, tensors)) for config, tensors in others]

    def of_chunk(self, chunks: Chunks, chunk: int) -> Hashable:
        """The kind of a chunk of the policy; chunks of one kind are alike but for the numbers of their layers."""
        kinds = tuple(self.of_policy[layer] for layer in chunks.layers[chunk])
        return kinds, chunk == 0, chunk == chunks.last, chunk == chunks.local[0], chunks.has_last

    def of_stage(self, workload: Workload, stage: int) -> Hashable:
        """The kind of a stage; stages of one kind take the same memory, and send and compute as much for a pass."""
        chunks = workload.chunks(stage)
        following = tuple(chunk + 1 in chunks.local for chunk in chunks.local)  # nothing is sent there
        others = tuple(_of_chunks(kinds, workload.chunks(stage, config)) for config, kinds in self._others)
        # PipeDream's later stages keep fewer versions of weights.
        number = stage if workload.recipe.parallel.pipeline.updates_each_micro_batch else None
        chosen = tuple(workload.planned_kinds[layer] for layer in chunks.local_layers if workload.planned_kinds)
        return _of_chunks(self.of_policy, chunks), chosen, following, others, number


def _of_chunks(kinds: Sequence[int], chunks: Chunks) -> Hashable:
    own = tuple(tuple(kinds[layer] for layer in chunks.layers[chunk]) for chunk in chunks.local)
    return own, chunks.has_first, chunks.has_last


def _layer_kinds(
    config: ModelConfig, tensors: Iterable[ModelTensor], training: Sequence[Hashable] | None = None
) -> tuple[int, ...]:
    """The number of each layer's kind: those with the same spec, tensors and training have the same."""
    of_layer: dict[int, list[Hashable]] = defaultdict(list)
    for each in tensors:
        if each.name.startswith("layers."):
            _, layer, name = each.name.split(".", 2)
            of_layer[int(layer)].append(replace(each, name=name, linear=each.linear.partition(f".{layer}.")[2]))
    numbers: dict[Hashable, int] = {}
    return tuple(
        numbers.setdefault((spec, tuple(of_layer[layer]), training[layer] if training else None), len(numbers))
        for layer, spec in enumerate(config.layers)
    )
