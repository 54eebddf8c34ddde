"""Seconds of passes over a whole decoder on one process, without a pipeline and without collectives. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from danlu.memory.layer_plan import Kind
from danlu.models.config import ModelConfig
from danlu.planning.batch_shape import WHOLE, BatchShape, Document, Kernels, RankShare
from danlu.planning.layer_graph import TRAINED, LayerGraph, LayerTraining
from danlu.planning.layer_seconds import layer_seconds
from danlu.planning.primitives import PassSeconds, sum_of
from danlu.planning.speeds import Speeds
from danlu.planning.step_work import embedding_work, loss_work, norm_work

_MOST_BATCHES = 8
"""Micro-batches that are computed; of more, evenly spaced ones stand for all."""


@dataclass(frozen=True)
class DecoderSeconds:
    """A decoder on one process, with the speeds of it."""

    config: ModelConfig
    speeds: Speeds
    element_bytes: int
    device: str = "cpu"
    kernels: Kernels = "cpu"
    training: tuple[LayerTraining, ...] = ()
    """The training of each layer; empty: all weights are trained."""
    recompute: tuple[Kind, ...] = ()
    """The recomputation of each layer; empty: there is none."""
    share: RankShare = WHOLE

    def forward(self, batches: Sequence[Sequence[Document]], targets: int) -> float:
        """Seconds of a pass without gradients over micro-batches.

        targets: tokens of all of them of which a log-probability is computed.
        """
        return self._passes(batches, targets, gradients=False).forward

    def training_step(self, batches: Sequence[Sequence[Document]], targets: int) -> float:
        """Seconds of both passes over the micro-batches of a step, without the update."""
        passes = self._passes(batches, targets, gradients=True)
        return passes.total + passes.accumulation * (1 - 1 / max(1, len(batches)))

    def _passes(self, batches: Sequence[Sequence[Document]], targets: int, *, gradients: bool) -> PassSeconds:
        step = max(1, -(-len(batches) // _MOST_BATCHES))
        chosen = batches[::step]
        tokens = [sum(run.tokens for document in batch for run in document) for batch in batches]
        if not sum(tokens):
            return PassSeconds()
        of_chosen = sum(tokens[::step])
        computed = sum_of(
            self._batch(tuple(batch), round(targets * own / sum(tokens)), gradients=gradients)
            for batch, own in zip(chosen, tokens[::step], strict=True)
            if own
        )
        return _times(computed, sum(tokens) / of_chosen)

    def _batch(self, documents: tuple[Document, ...], targets: int, *, gradients: bool) -> PassSeconds:
        config, width = self.config, self.config.hidden_size
        batch = BatchShape(documents, self.element_bytes, self.kernels)
        count = len(config.layers)
        training = self.training or (TRAINED,) * count
        nothing: Kind = "none"
        recompute = self.recompute or (nothing,) * count
        kinds = Counter(zip(config.layers, training, recompute, strict=True))
        parts = [
            _times(layer_seconds(LayerGraph(spec, width, batch, own, kind, self.share), self.speeds), number)
            for (spec, own, kind), number in kinds.items()
        ]
        is_frozen = not all(each.weights for each in training)
        head = loss_work(
            targets,
            width,
            config.vocab_rows // self.share.degree,
            self.element_bytes,
            frozen=is_frozen,
            gradients=gradients,
            device=self.device,
        )
        embedding = embedding_work(
            batch.tokens,
            width,
            config.vocab_rows // self.share.degree,
            self.element_bytes,
            trained=not is_frozen,
            sparse=self.device == "cpu" and config.has_own_head,
        )
        of_ends = [embedding, norm_work(batch.tokens, width, self.element_bytes), head]
        return sum_of([*parts, PassSeconds.of(of_ends, self.speeds)])


def _times(seconds: PassSeconds, factor: float) -> PassSeconds:
    """The seconds of as many such parts."""
    return PassSeconds(
        seconds.forward * factor,
        seconds.backward_input * factor,
        seconds.backward_weight * factor,
        seconds.recompute * factor,
        seconds.accumulation * factor,
        {kind: value * factor for kind, value in seconds.by_kind.items()},
        seconds.extrapolated,
    )
