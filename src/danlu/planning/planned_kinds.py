"""The kinds of recomputation that `memory.recompute: planned` is expected to choose, from configs. Imports no torch.

A run measures its layers (`assembly.planned_recompute`); here bytes are those of `layer_graph`, which are what autograd
keeps, and seconds those of `layer_seconds`. The choice is made by the same solver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from danlu.core.token_buckets import padding_to_bucket
from danlu.memory.layer_plan import KINDS, Kind
from danlu.memory.recompute_choice import LayerCosts, Option, fastest_plan
from danlu.planning.batch_shape import ELEMENT_BYTES, BatchShape, Kernels, RankShare
from danlu.planning.cards import Card, find_card
from danlu.planning.layer_graph import LayerGraph
from danlu.planning.layer_seconds import layer_seconds
from danlu.planning.layer_training import training_of_chunks
from danlu.planning.rank_memory import micro_batches_in_flight
from danlu.planning.speeds import CardSpeeds, Speeds
from danlu.planning.workload import Workload

_STANDARD_CARD = "A100-80G"
"""The card with speeds that decide where those of the machine are not known: only their ratios matter."""


def planned_kinds(workload: Workload, kernels: Kernels, speeds: Speeds | None) -> tuple[Kind, ...]:
    """The kind of each layer of the policy.

    kernels, speeds: of the device; None: speeds are not known. Raises RecipeError for a budget that is too small, as a
    run does.
    """
    section = workload.recipe.memory.recompute
    assert section.kind == "planned" and section.budget is not None, "the recipe's rules ask for a budget"
    costs = _Costs(workload, kernels, speeds or _standard_speeds())
    kinds: dict[int, Kind] = {}
    pipeline = workload.recipe.parallel.pipeline
    for stage in range(pipeline.stages):
        in_flight = micro_batches_in_flight(pipeline, stage)
        plan = fastest_plan(list(costs.of_stage(stage)), int(section.budget * 2**30), in_flight)
        kinds |= {entry.layer: entry.kind for entry in plan}
    return tuple(kinds[layer] for layer in range(len(workload.config.layers)))


def _standard_speeds() -> Speeds:
    card = find_card(_STANDARD_CARD)
    assert isinstance(card, Card), card
    return CardSpeeds(card)


@dataclass(frozen=True)
class _Costs:
    workload: Workload
    kernels: Kernels
    speeds: Speeds

    def of_stage(self, stage: int) -> Iterator[LayerCosts]:
        """Yields the costs of each layer that a stage has."""
        workload, chunks = self.workload, self.workload.chunks(stage)
        training = training_of_chunks(workload.training, chunks, chunks.local)
        batch, share = self._batch, RankShare(workload.recipe.parallel.tensor, workload.recipe.parallel.sequence)
        known: dict[LayerGraph, LayerCosts] = {}
        for layer, own in zip(chunks.local_layers, training, strict=True):
            graph = LayerGraph(workload.config.layers[layer], workload.config.hidden_size, batch, own, "none", share)
            if graph not in known:
                known[graph] = self._of_layer(graph)
            yield LayerCosts(layer, known[graph].whole_bytes, known[graph].options)

    @property
    def _batch(self) -> BatchShape:
        """Full packs of one document each, padded as in a step."""
        recipe = self.workload.recipe
        micro, length = recipe.batch.micro, recipe.data.max_length
        assert isinstance(micro, int), "the recipe's rules ask for it"
        padding = padding_to_bucket(micro * length)
        lengths = [length] * micro + [padding] * (padding > 0)
        return BatchShape.of_lengths(lengths, ELEMENT_BYTES[recipe.activations], self.kernels)

    def _of_layer(self, graph: LayerGraph) -> LayerCosts:
        recipe = self.workload.recipe
        options = []
        for kind in KINDS:
            own = LayerGraph(graph.spec, graph.width, graph.batch, graph.training, kind, graph.share)
            again = layer_seconds(own, self.speeds, expert_ranks=recipe.parallel.expert).recompute
            options.append(Option(kind, own.kept_bytes, again))
        # With sequence parallelism all tokens are gathered again, at one entrance after the other.
        gathered = graph.batch.tokens * graph.width * graph.batch.element_bytes if graph.share.sequence else 0
        return LayerCosts(0, options[0].kept_bytes + gathered, tuple(options))
