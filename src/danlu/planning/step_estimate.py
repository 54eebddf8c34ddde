"""The activations and the loss of a step's micro-batches, before there are any. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from danlu.memory.layer_plan import LayerPlan
from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig
from danlu.models.kernel_limits import SHORT_DOCUMENT
from danlu.objectives.loss_memory import workspace_bytes
from danlu.planning.activation_memory import ActivationBytes, ActivationPlan, LayerPass, activation_bytes
from danlu.planning.batch_shape import ELEMENT_BYTES, BatchShape, ContextCut, Document, DocumentRun, Kernels, RankShare
from danlu.planning.layer_graph import LayerGraph, LayerTraining
from danlu.planning.layer_memory import LayerMemory
from danlu.planning.layer_training import layers_training
from danlu.recipe import Recipe
from danlu.recipe.sections import Context

if TYPE_CHECKING:
    import numpy as np

    from danlu.planning.chunk_memory import ChunkGradients
    from danlu.planning.row_batches import RowBatches
    from danlu.planning.step_walk import ChunkCost

_FLOAT32 = 4


class CriticPass(NamedTuple):
    """A second pass with gradients, of a model of values."""

    config: ModelConfig
    plan: Sequence[LayerPlan]


@dataclass(frozen=True)
class StepEstimate:
    """The bytes that the micro-batches of one process keep, and that their passes take."""

    recipe: Recipe
    config: ModelConfig
    """The model; for a stage of a pipeline, with the layers that it has."""
    _: KW_ONLY
    plan: Sequence[LayerPlan]
    """The recomputation of each layer; empty where it is not known (`recompute: planned`, before layers are
    measured)."""
    micro: int
    """Packed sequences of full length in a micro-batch."""
    device_type: str
    kernels: Kernels = "cpu"
    """The attention kernels of the device."""
    critic: CriticPass | None = None
    """The pass of a value model, with activations that are kept together with the policy's."""
    has_head: bool = True
    """Whether the loss is computed there."""
    training: tuple[LayerTraining, ...] = ()
    """The parts of each layer that are trained; empty: as the recipe says of a whole model with these layers."""
    lengths: np.ndarray | None = field(default=None, compare=False)
    """[rows] int: tokens of each row that is trained on; None where rows are not known."""
    rows: RowBatches | None = None
    """The micro-batches of rows with judged answers; None for other rows, and where their lengths are not known."""

    @property
    def activations(self) -> ActivationBytes:
        """Bytes of the activations of a micro-batch; a critic's are there with the policy's."""
        activations = self._pass_activations(self.config, self.plan)
        if self.critic is None:
            return activations
        own = self._pass_activations(self.critic.config, self.critic.plan)
        return ActivationBytes(activations.kept + own.kept, max(activations.recomputed, own.recomputed))

    @property
    def logits(self) -> int:
        """Bytes that the loss of a micro-batch takes in addition to its inputs."""
        return self._loss_workspace(self._sequences) + self._head_copy

    @property
    def _most_paths(self) -> int:
        if self.rows is not None:
            return 1
        return longest_paths(self.recipe)

    @property
    def _sequences(self) -> int:
        return max(self.micro, self._most_paths)

    def _pass_activations(self, config: ModelConfig, plan: Sequence[LayerPlan]) -> ActivationBytes:
        """Bytes of one model's pass over the micro-batch that takes the most."""
        memory, settings = self.recipe.memory, self._settings(config, plan)
        activations = max(
            (activation_bytes(config, batch, settings) for batch in self._batches(self._sequences)),
            key=lambda batch: batch.peak(0),
        )
        budget = memory.recompute.budget
        if budget is None or plan:
            return activations
        # Which layers recompute is found once they are measured; the plan then keeps to its budget.
        return ActivationBytes(min(activations.kept, int(budget * 2**30)))

    def _settings(self, config: ModelConfig, plan: Sequence[LayerPlan]) -> ActivationPlan:
        memory, section = self.recipe.memory, self.recipe.parallel
        is_policy = config is self.config and self.training
        training = self.training if is_policy else layers_training(self.recipe, config)
        kinds = [(layer.kind, layer.segment) for layer in plan] or [("none", None)] * len(config.layers)
        return ActivationPlan(
            layers=[LayerPass(*kind, own) for kind, own in zip(kinds, training, strict=True)],
            offload="activations" in memory.offload and (self.device_type != "cpu" or memory.folder is not None),
            in_flight=self.device_type != "cpu",
            share=RankShare(section.tensor, section.sequence),
            has_head=self.has_head,
        )

    def _batches(self, sequences: int) -> list[BatchShape]:
        element_bytes = ELEMENT_BYTES[self.recipe.activations]
        return [
            BatchShape(documents, element_bytes, self.kernels, context=cut, targets=self._row_targets(sequences))
            for documents, cut in self._documents(sequences)
        ]

    def _row_targets(self, sequences: int) -> int | None:
        """Targets of the largest micro-batch of rows on one context rank; None where all tokens count as such."""
        if self.rows is None:
            return None
        return -(-self.rows.largest(sequences).targets // self.recipe.parallel.context.size)

    def chunk_cost(self, gradients: ChunkGradients) -> ChunkCost:
        """The bytes of a micro-batch's passes, of the micro-batch that keeps most; without what is gathered.

        A model of values, and activations that are offloaded or have a budget, count as `activations` has them, in all
        passes alike.
        """
        # A run that estimates its own step loads neither.
        from danlu.planning.chunk_memory import chunk_memory
        from danlu.planning.step_walk import ChunkCost

        settings, budget = self._settings(self.config, self.plan), self.recipe.memory.recompute.budget
        if self.critic is None and not settings.offload and (budget is None or self.plan):
            batches = self._batches(self._sequences)
            costs = [chunk_memory(self.config, batch, settings, gradients, self.logits) for batch in batches]
            return max(costs, key=lambda cost: (max(cost.kept + cost.loss, cost.backward_peak), cost.kept))
        peak = self.activations.kept + self.activations.recomputed
        waiting = sum(each.frees for graph in self.graphs() for each in LayerMemory(graph).put_off)
        return ChunkCost(
            kept=self.activations.kept,
            forward_peak=peak,
            loss=self.logits,
            backward_peak=peak,
            input_peak=max(peak, waiting),
            kept_for_weight=waiting,
            weight_peak=waiting,
            gradients=gradients.total,
            gradients_of_forward=gradients.head,
        )

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on this rank; of rows of unknown lengths those of full packs."""
        if self.rows is None:
            return self.micro * self.recipe.data.max_length // self.recipe.parallel.context.size
        return self._batches(self._sequences)[0].tokens

    def graphs(self) -> Iterator[LayerGraph]:
        """Yields the layers of the policy in the micro-batch with the longest documents."""
        settings, batch = self._settings(self.config, self.plan), self._batches(self._sequences)[0]
        for spec, own in zip(self.config.layers, settings.layers, strict=True):
            yield LayerGraph(spec, self.config.hidden_size, batch, own.training, own.recompute, settings.share)

    def _documents(self, sequences: int) -> list[tuple[tuple[Document, ...], ContextCut | None]]:
        """The documents of the micro-batches that may take the most, with their cut over context ranks.

        They are the longest rows, and the longest rows that keep probabilities, where longer ones leave them to a
        kernel. Context ranks cut the former, and deal out the latter whole.
        """
        length, section = self.recipe.data.max_length, self.recipe.parallel.context
        if self.rows is not None:
            return self._row_documents(self.rows.largest(sequences).documents)
        longest = [-(-tokens // section.size) for tokens in self._longest(sequences, length)]
        mixes = [(tuple(map(_document, longest)), context_cut(section))]
        if self.device_type == "cpu":
            is_pair = self._most_paths == 2
            # A row with two answers that are as long as the prompt is a stem and two branches of a third each, and a
            # branch keeps probabilities of its whole path.
            short = SHORT_DOCUMENT * 3 // 2 if is_pair else SHORT_DOCUMENT
            if section.size > 1:
                from danlu.core.types import WHOLE_SHARE  # here: a plan without context ranks needs no types of batches

                short = min(short, int(WHOLE_SHARE * sequences * length / section.size))
            rows = self._longest(sequences, short, short)[:: section.size]
            mixes.append((tuple(map(_pair if is_pair else _document, rows)), None))
        return [mix for mix in mixes if mix[0]]

    def _row_documents(self, documents: tuple[Document, ...]) -> list[tuple[tuple[Document, ...], ContextCut | None]]:
        """The documents of a micro-batch of rows on one context rank: cut, and dealt out whole."""
        size = self.recipe.parallel.context.size
        if size == 1:
            return [(documents, None)]
        cut = tuple(tuple(DocumentRun(*(-(-each // size) for each in run)) for run in own) for own in documents)
        return [(cut, context_cut(self.recipe.parallel.context)), (documents[::size], None)]

    def _longest(self, sequences: int, length: int, most: int | None = None) -> list[int]:
        """Documents of at most `length` tokens that fill the micro-batch, of the longest rows of at most `most` tokens.

        A longer row is cut: into packed sequences, or one with two answers into as many paths.
        """
        tokens = sequences * self.recipe.data.max_length
        if self.lengths is None:
            whole, last = divmod(tokens, length)
            return [length] * whole + [last] * (last > 0)
        import numpy as np  # here: packs of unknown documents, as above, need none

        rows = self.lengths if most is None else self.lengths[self.lengths <= most]
        whole, rest = min(-(-tokens // length), int((rows // length).sum())), rows % length
        documents = np.concatenate([np.full(whole, length), -np.sort(-rest[rest > 0])])
        before = np.cumsum(documents) - documents
        documents = np.minimum(documents, tokens - before)[before < tokens]
        return [int(each) for each in documents]

    def _loss_workspace(self, sequences: int) -> int:
        """Bytes that the fused head and loss take in addition to their inputs, if every token is trained."""
        recipe, config = self.recipe, self.config
        if not self.has_head or config.task != "causal-lm":
            return 0
        targets = self._row_targets(sequences)
        if targets is None:
            targets = -(-sequences * recipe.data.max_length // recipe.parallel.context.size)
        return workspace_bytes(
            targets,
            config.hidden_size,
            config.vocab_size // recipe.parallel.tensor,
            element_bytes=ELEMENT_BYTES[recipe.activations],
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
        return matrix * (2 * _FLOAT32 if recipe.adapter is None else ELEMENT_BYTES[recipe.activations])


def longest_paths(recipe: Recipe) -> int:
    """Paths of `data.max_length` tokens that the longest item has: a row with two answers is never cut in two."""
    return 2 if recipe.row_type == "preference" or recipe.needs_mismatched else 1


def context_cut(section: Context) -> ContextCut | None:
    """The cut of documents by a recipe's section; None on one context rank."""
    if section.size == 1:
        return None
    heads = section.size if section.method == "ulysses" else section.ulysses
    return ContextCut(section.size // heads, heads, section.method == "gather")


def _document(tokens: int) -> Document:
    return (DocumentRun(tokens),)


def _pair(tokens: int) -> Document:
    """A prompt and two answers, all of one length."""
    third = max(1, tokens // 3)
    return DocumentRun(third), DocumentRun(third, third), DocumentRun(third, third)


def stage_config(config: ModelConfig, chunks: Chunks) -> ModelConfig:
    """The config of a model with the layers of one stage of a pipeline alone."""
    if chunks.last == 0:
        return config
    return replace(config, layers=tuple(config.layers[layer] for layer in chunks.local_layers))
