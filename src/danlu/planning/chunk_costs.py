"""Seconds and bytes of a micro-batch's passes through each chunk of a model, on one rank. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from danlu.models.chunks import Chunks
from danlu.optim.state_shapes import FLOAT32_BYTES, optimizer_bytes
from danlu.planning.batch_shape import ELEMENT_BYTES, BatchShape, DocumentRun, RankShare
from danlu.planning.chunk_memory import ChunkGradients
from danlu.planning.layer_graph import LayerGraph, Recompute
from danlu.planning.layer_seconds import layer_seconds
from danlu.planning.layer_training import training_of_chunks
from danlu.planning.layer_work import layer_work, recomputed_operations
from danlu.planning.mean_documents import mean_documents
from danlu.planning.primitives import OperationSeconds, OperationWork, PassSeconds, sum_of
from danlu.planning.rank_memory import chunks_step, gathered_bytes_of
from danlu.planning.rank_tensors import RankTensor
from danlu.planning.speeds import Speeds
from danlu.planning.step_estimate import context_cut
from danlu.planning.step_walk import ChunkCost
from danlu.planning.step_work import embedding_work, loss_work, norm_work, own_embeddings_work
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe.roles import PolicyWithoutAdapter, frozen_roles


class LayerTimes:
    """The seconds of layers by their settings, each computed once; searches ask for the same ones again."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self._known: dict[tuple[object, ...], PassSeconds] = {}
        self._operations: dict[tuple[object, ...], tuple[LayerGraph, list[OperationSeconds]]] = {}
        """Layers that recompute nothing, with the seconds of their operations."""

    def of(self, graph: LayerGraph, expert_ranks: int, *, narrow_weights: bool = False) -> PassSeconds:
        """The seconds of a layer on one rank; arguments are those of `layer_seconds`."""
        key = (graph, expert_ranks, narrow_weights)
        if key not in self._known:
            self._known[key] = self._of(graph, expert_ranks, narrow_weights=narrow_weights)
        return self._known[key]

    def _of(self, graph: LayerGraph, expert_ranks: int, *, narrow_weights: bool) -> PassSeconds:
        if graph.recompute == "elementwise":  # in the backward pass of its attention there are other primitives
            return layer_seconds(graph, self.speeds, expert_ranks=expert_ranks, narrow_weights=narrow_weights)
        base = replace(graph, recompute="none")
        key = (base, expert_ranks, narrow_weights)
        if key not in self._operations:
            work = layer_work(base, expert_ranks=expert_ranks, narrow_weights=narrow_weights)
            self._operations[key] = base, [OperationSeconds.of(each, self.speeds) for each in work]
        base, operations = self._operations[key]
        again = recomputed_operations(base.recomputing(graph.recompute))
        return PassSeconds.of_operations(
            each._replace(recomputed=is_again) for each, is_again in zip(operations, again, strict=True)
        )


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
    is_narrow = recipe.parallel.shard != "none" and recipe.gathers_activation_type
    layers: list[PassSeconds] = []
    before: object = None
    for layer, (spec, own) in enumerate(zip(config.layers, training, strict=True)):
        inputs = spec, own, kinds.get(layer, "none")
        if inputs != before:  # most layers are like the one before
            graph = LayerGraph(spec, config.hidden_size, batch, own, inputs[2], share)
            layers.append(times.of(graph, recipe.parallel.expert, narrow_weights=is_narrow))
            before = inputs
        else:
            layers.append(layers[-1])
    speeds, device = times.speeds, target.device_type
    is_alone = target.cluster.ranks == 1 and config.has_own_head and not recipe.compile
    embedding = PassSeconds.of(_embeddings(workload, batch, share, is_sparse=device == "cpu" and is_alone), speeds)
    return ModelSeconds(tuple(layers), embedding, PassSeconds.of(_head(workload, batch, share, device), speeds))


def _embeddings(workload: Workload, batch: BatchShape, share: RankShare, *, is_sparse: bool) -> Iterator[OperationWork]:
    """The embedding, and those of each layer. is_sparse: whether its gradient has the rows of tokens alone."""
    recipe, config = workload.recipe, workload.config
    element_bytes, width = ELEMENT_BYTES[recipe.activations], config.hidden_size
    is_trained, rows = recipe.adapter is None, -(-config.vocab_size // share.degree)
    yield embedding_work(batch.tokens, width, rows, element_bytes, trained=is_trained, sparse=is_sparse)
    if columns := config.per_layer_columns:
        tokens = -(-batch.tokens // share.degree) if share.sequence else batch.tokens
        yield embedding_work(batch.tokens, columns, rows, element_bytes, trained=is_trained)
        yield own_embeddings_work(tokens, width, columns, element_bytes, trained=is_trained)


def _head(workload: Workload, batch: BatchShape, share: RankShare, device_type: str) -> Iterator[OperationWork]:
    """The final norm, and the head with the loss."""
    recipe, config = workload.recipe, workload.config
    element_bytes, width = ELEMENT_BYTES[recipe.activations], config.hidden_size
    yield norm_work(-(-batch.tokens // share.degree) if share.sequence else batch.tokens, width, element_bytes)
    if config.task == "causal-lm":
        rows, is_frozen = -(-config.vocab_size // share.degree), recipe.adapter is not None
        targets = batch.tokens if batch.targets is None else batch.targets
        yield loss_work(targets, width, rows, element_bytes, frozen=is_frozen, device=device_type)


def chunk_bytes(
    workload: Workload, chunks: Chunks, chunk: int, micro: int, target: Target, tensors: Iterable[RankTensor]
) -> ChunkCost:
    """The bytes of the micro-batch that takes most, in one of the local chunks.

    tensors: those of the chunk's rank that are trained, or gathered from shards.
    """
    step = chunks_step(workload, chunks, target.device_type, target.kernels, micro, chunk=chunk)
    own = replace(chunks, local=(chunk,))
    recipe, tensors = workload.recipe, list(tensors)
    gathered, whole_gradients = gathered_bytes_of(workload, tensors)
    trained = {each.name: each.shape for each in tensors if each.whole.trained}
    total = optimizer_bytes(recipe.optimizer, trained, paged=False).gradients
    if not recipe.parallel.reduces_each_micro_batch:  # whole ones wait in each chunk for the last micro-batch
        total, whole_gradients = total + whole_gradients, 0
    cost = step.chunk_cost(_chunk_gradients(workload, own, tensors, total, target.device_type))
    share, tokens = rank_share(workload), step.tokens
    stream = tokens * workload.config.hidden_size * ELEMENT_BYTES[recipe.activations]
    cost = replace(
        cost,
        gathered=gathered,
        message=-(-stream // share.degree) if share.sequence else stream,
        frozen_message=_frozen_message(workload, tokens),
    )
    if recipe.parallel.shard != "none":  # whole gradients come and go layer by layer, and shards stay
        cost = replace(
            cost, first_backward=None, first_weight=None, gradients_of_input=total, whole_gradients=whole_gradients
        )
    return cost


def _frozen_message(workload: Workload, tokens: int) -> int:
    """Bytes of the hidden states of frozen models that go through a pipeline with the policy's, of all tokens."""
    recipe = workload.recipe
    if recipe.parallel.pipeline.stages == 1 or recipe.stage == "rl":  # which are asked before the step
        return 0
    widths = {model.role: model.config.hidden_size for model in workload.frozen}
    widths |= {
        role: workload.config.hidden_size
        for role, model in frozen_roles(recipe).items()
        if isinstance(model, PolicyWithoutAdapter)
    }
    return tokens * sum(widths.values()) * ELEMENT_BYTES[recipe.activations]


def _chunk_gradients(
    workload: Workload, chunks: Chunks, tensors: Sequence[RankTensor], total: int, device_type: str
) -> ChunkGradients:
    """The gradients of a chunk's weights; tensors: those that are trained, among others."""
    config = workload.config
    sizes = {each.name: math.prod(each.gathered or each.cut) for each in tensors if each.whole.trained}
    is_sharded = workload.recipe.parallel.shard != "none"
    element_bytes = ELEMENT_BYTES[workload.recipe.activations] if is_sharded else FLOAT32_BYTES
    embedding = sizes.get("embed_tokens.weight", 0) if 0 in chunks.local and device_type != "cpu" else 0
    head = 0
    if chunks.has_last and config.task == "causal-lm":
        head = sizes.get("lm_head.weight" if config.has_own_head else "embed_tokens.weight", 0)
    return ChunkGradients(total, element_bytes * embedding, element_bytes * head)


def mean_batch(workload: Workload, micro: int, target: Target) -> BatchShape:
    """A micro-batch of the run's mean documents as a rank computes it; with full packs where lengths are not known."""
    recipe, targets = workload.recipe, None
    cut, size = context_cut(recipe.parallel.context), recipe.parallel.context.size
    if (rows := workload.row_batches) is not None:
        documents, of_all = rows.mean(micro)
        targets = -(-of_all // size)
    else:
        documents = tuple(
            (DocumentRun(length),) for length in mean_documents(workload.lengths, micro, recipe.data.max_length)
        )
    own = tuple(tuple(DocumentRun(*(-(-each // size) for each in run)) for run in document) for document in documents)
    return BatchShape(own, ELEMENT_BYTES[recipe.activations], target.kernels, context=cut, targets=targets)


def rank_share(workload: Workload) -> RankShare:
    """The share of a layer that a tensor rank has."""
    section = workload.recipe.parallel
    return RankShare(section.tensor, section.sequence)
