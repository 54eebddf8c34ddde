"""Seconds and bytes of a micro-batch's passes through each chunk of a model, on one rank. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from danlu.models.chunks import Chunks
from danlu.optim.state_shapes import optimizer_bytes
from danlu.planning.batch_shape import BatchShape, RankShare
from danlu.planning.layer_graph import LayerGraph, Recompute
from danlu.planning.layer_seconds import layer_seconds
from danlu.planning.layer_training import training_of_chunks
from danlu.planning.mean_documents import mean_documents
from danlu.planning.model_tensors import ELEMENT_BYTES
from danlu.planning.primitives import OperationWork, PassSeconds, sum_of
from danlu.planning.rank_memory import chunks_step, gathered_bytes_of
from danlu.planning.rank_tensors import RankTensor
from danlu.planning.speeds import Speeds
from danlu.planning.step_estimate import StepEstimate, context_cut
from danlu.planning.step_walk import ChunkCost
from danlu.planning.step_work import embedding_work, loss_work, norm_work, own_embeddings_work
from danlu.planning.target import Target
from danlu.planning.workload import Workload


class LayerTimes:
    """The seconds of layers by their settings, each computed once; searches ask for the same ones again."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self._known: dict[tuple[object, ...], PassSeconds] = {}

    def of(self, graph: LayerGraph, expert_ranks: int) -> PassSeconds:
        """The seconds of a layer on one rank. expert_ranks: the ranks that share the experts."""
        key = (graph, expert_ranks)
        if key not in self._known:
            self._known[key] = layer_seconds(graph, self.speeds, expert_ranks=expert_ranks)
        return self._known[key]


@dataclass(frozen=True)
class ModelSeconds:
    """The seconds of a micro-batch in each part of the model, on the ranks that share its tokens; no collectives."""

    layers: tuple[PassSeconds, ...]
    embedding: PassSeconds
    """The embedding, and those of each layer."""
    head: PassSeconds
    """The final norm, the head and the loss."""

    @cached_property
    def total(self) -> PassSeconds:
        """All parts."""
        return self.of(range(len(self.layers)))

    def of(self, span: range) -> PassSeconds:
        """The seconds of a chunk with some layers."""
        parts = [*self.layers[span.start : span.stop]]
        if span.start == 0:
            parts.append(self.embedding)
        if span.stop == len(self.layers):
            parts.append(self.head)
        return sum_of(parts)


def model_seconds(workload: Workload, micro: int, target: Target, times: LayerTimes) -> ModelSeconds:
    """The seconds of the mean micro-batch in each part of the model."""
    recipe, config = workload.recipe, workload.config
    batch, share = mean_batch(workload, micro, target), rank_share(workload)
    first = workload.chunks(0)
    kinds: dict[int, Recompute] = {}
    for stage in range(recipe.parallel.pipeline.stages):
        kinds |= {entry.layer: entry.kind for entry in workload.recompute(workload.chunks(stage))}
    training = training_of_chunks(workload.training, first, range(len(first.layers)))
    layers = tuple(
        times.of(
            LayerGraph(spec, config.hidden_size, batch, own, kinds.get(layer, "none"), share), recipe.parallel.expert
        )
        for layer, (spec, own) in enumerate(zip(config.layers, training, strict=True))
    )
    speeds, device = times.speeds, target.device_type
    embedding = PassSeconds.of(_embeddings(workload, batch, share), speeds)
    return ModelSeconds(layers, embedding, PassSeconds.of(_head(workload, batch, share, device), speeds))


def _embeddings(workload: Workload, batch: BatchShape, share: RankShare) -> Iterator[OperationWork]:
    """The embedding, and those of each layer."""
    recipe, config = workload.recipe, workload.config
    element_bytes, width = ELEMENT_BYTES[recipe.precision], config.hidden_size
    is_trained, rows = recipe.adapter is None, -(-config.vocab_size // share.degree)
    yield embedding_work(batch.tokens, width, rows, element_bytes, trained=is_trained)
    if columns := config.per_layer_columns:
        tokens = -(-batch.tokens // share.degree) if share.sequence else batch.tokens
        yield embedding_work(batch.tokens, columns, rows, element_bytes, trained=is_trained)
        yield own_embeddings_work(tokens, width, columns, element_bytes, trained=is_trained)


def _head(workload: Workload, batch: BatchShape, share: RankShare, device_type: str) -> Iterator[OperationWork]:
    """The final norm, and the head with the loss."""
    recipe, config = workload.recipe, workload.config
    element_bytes, width = ELEMENT_BYTES[recipe.precision], config.hidden_size
    yield norm_work(-(-batch.tokens // share.degree) if share.sequence else batch.tokens, width, element_bytes)
    if config.task == "causal-lm":
        rows, is_frozen = -(-config.vocab_size // share.degree), recipe.adapter is not None
        yield loss_work(batch.tokens, width, rows, element_bytes, frozen=is_frozen, device=device_type)


def chunk_bytes(
    workload: Workload, chunks: Chunks, chunk: int, micro: int, target: Target, tensors: Iterable[RankTensor]
) -> ChunkCost:
    """The bytes of the micro-batch that takes most, in one chunk.

    tensors: those of the chunk's rank that are trained, or gathered from shards.
    """
    own = replace(chunks, local=(chunk,))
    step = chunks_step(workload, own, target.device_type, target.kernels, micro)
    activations, recipe = step.activations, workload.recipe
    peak = activations.kept + activations.recomputed
    tensors = list(tensors)
    gathered, whole_gradients = gathered_bytes_of(workload, tensors)
    trained = {each.name: each.shape for each in tensors if each.whole.trained}
    gradients = optimizer_bytes(recipe.optimizer, trained, paged=False).gradients
    tokens = micro * recipe.data.max_length // recipe.parallel.context.size
    share = rank_share(workload)
    stream = tokens * workload.config.hidden_size * ELEMENT_BYTES[recipe.precision]
    return ChunkCost(
        kept=activations.kept,
        forward_peak=peak,
        loss=step.logits,
        backward_peak=peak,
        input_peak=peak,
        kept_for_weight=_kept_for_weight(workload, own, step),
        weight_peak=_kept_for_weight(workload, own, step),
        gradients=gradients + whole_gradients,
        gathered=gathered,
        message=-(-stream // share.degree) if share.sequence else stream,
    )


def _kept_for_weight(workload: Workload, chunks: Chunks, step: StepEstimate) -> int:
    """Bytes of the inputs of trained products and of the gradients of their outputs, which wait for a put-off pass."""
    if not workload.recipe.parallel.pipeline.defers_weight_gradients:
        return 0
    total = 0
    for graph in step.graphs():
        names = set[str]()
        for operation in graph.with_backward:
            adapter = graph.training.adapter_of(operation.name)
            if operation.is_product and (graph.training.weights or adapter is not None):
                names.add(operation.reads[0])
                total += graph.bytes_of(operation.makes[0].name)
        total += sum(map(graph.bytes_of, names))
    return total


def mean_batch(workload: Workload, micro: int, target: Target) -> BatchShape:
    """A micro-batch of the run's mean documents as a rank computes it; with full packs where lengths are not known."""
    recipe = workload.recipe
    documents = mean_documents(workload.lengths, micro, recipe.data.max_length)
    cut, size = context_cut(recipe.parallel.context), recipe.parallel.context.size
    lengths = [-(-length // size) for length in documents]
    return replace(BatchShape.of_lengths(lengths, ELEMENT_BYTES[recipe.precision], target.kernels), context=cut)


def rank_share(workload: Workload) -> RankShare:
    """The share of a layer that a tensor rank has."""
    section = workload.recipe.parallel
    return RankShare(section.tensor, section.sequence)
