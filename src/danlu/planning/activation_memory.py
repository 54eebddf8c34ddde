"""Bytes of the activations of a training step in closed form. Imports no torch.

Activations are those of `layer_memory`, layer by layer, with the tensors outside of layers. Tests compare them with the
tensors that autograd keeps and with the measured peak of a step.

T tokens of a micro-batch · D model width
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from danlu.models.config import ModelConfig
from danlu.models.layer_spec import LayerSpec
from danlu.models.operations import ROTATION
from danlu.planning.batch_shape import WHOLE, BatchShape, RankShare
from danlu.planning.layer_graph import TRAINED, LayerGraph, LayerTraining, Recompute
from danlu.planning.layer_memory import LayerMemory

_IN_FLIGHT = 10
"""Tensors of an offloaded forward pass that are on the device at a time: being copied out, and prefetched back."""


@dataclass(frozen=True)
class LayerPass:
    """The settings of one layer that decide which activations it keeps."""

    recompute: Recompute = "none"
    segment: int | None = None
    """The number of the segment of which only the first input is kept, if the layer is in one."""
    training: LayerTraining = TRAINED


@dataclass(frozen=True)
class ActivationPlan:
    """The settings that decide which activations are kept, in addition to the model's config."""

    layers: Sequence[LayerPass] = ()
    """The settings of each layer; empty: all are trained, and none is recomputed."""
    offload: bool = False
    """Whether activations are kept elsewhere than on the device."""
    in_flight: bool = True
    """Whether offloaded tensors take the device's memory while they travel; not so where they lie in mapped files."""
    share: RankShare = WHOLE
    has_head: bool = True
    """Whether the final norm and the loss come behind the layers; otherwise their output goes to another stage."""


KEEPS_ALL = ActivationPlan()


@dataclass(frozen=True)
class ActivationBytes:
    """The bytes of a micro-batch's activations, by the time when they are in memory."""

    kept: int
    """Bytes from the forward pass on, while the loss is computed too."""
    recomputed: int = 0
    """Bytes in addition to `kept`, while one layer is in its forward or its backward pass: temporaries, gradients of
    activations, and activations that it recomputes, or fetches back from the offload. The workspace of the loss is free
    by then, so the two never coincide."""

    def peak(self, loss_workspace: int) -> int:
        """The most bytes at a time; loss_workspace: bytes that the loss takes in addition to its inputs (its slices of
        logits)."""
        return self.kept + max(self.recomputed, loss_workspace)


def activation_bytes(config: ModelConfig, batch: BatchShape, plan: ActivationPlan = KEEPS_ALL) -> ActivationBytes:
    """Activations of a micro-batch.

    The passes go through the layers: before a layer's backward pass the layers in front of it have what they keep.
    Offloaded activations come back one operation after the other.
    """
    passes = plan.layers or (LayerPass(),) * len(config.layers)
    layers = [
        layer_memory(spec, config.hidden_size, batch, own.training, own.recompute, plan.share)
        for spec, own in zip(config.layers, passes, strict=True)
    ]
    width = batch.tokens * config.hidden_size * batch.element_bytes
    stream = -(-width // plan.share.degree) if plan.share.sequence else width
    again_by_segment = inputs_again(passes)
    before = peak = 0
    for own, settings, kept in zip(layers, passes, kept_by_layer(layers, passes), strict=True):
        again = stream * again_by_segment.get(settings.segment, 0)
        peak = max(peak, before + again + max(stream + own.forward, own.backward))
        before += kept
    if plan.offload:
        largest = max(own.graph.bytes_of(name) for own in layers for name in own.graph.values)
        before = min(before, _IN_FLIGHT * largest) if plan.in_flight else 0
        peak = before + max(max(own.offloaded_backward, own.forward + stream) for own in layers)
    has_tables = any(ROTATION in own.graph.kept.names for own in layers)
    trains_embeddings = any(own.training.trains_embeddings for own in passes)
    if passes[0].training.adapts_embeddings and "x" not in layers[0].graph.kept.names:
        before += stream  # the input of the adapted product that makes layers' own embeddings
    outside = OutsideLayers(config, batch, stream, has_tables, plan.has_head, trains_embeddings)
    kept = before + outside.throughout + outside.until_backward
    peak = max(peak + outside.throughout, kept + outside.norm_backward)
    return ActivationBytes(kept=kept, recomputed=max(0, peak - kept))


def kept_by_layer(layers: Sequence[LayerMemory], passes: Sequence[LayerPass]) -> list[int]:
    """The bytes that each layer keeps for its backward pass: in a segment the first one alone keeps its input."""
    segments = [None, *(settings.segment for settings in passes)]
    return [
        # Keys that later layers read leave the segment.
        sum(map(layer.graph.bytes_of, layer.graph.given)) if segment is not None and segment == before else layer.kept
        for layer, segment, before in zip(layers, segments[1:], segments, strict=False)
    ]


def inputs_again(passes: Sequence[LayerPass]) -> dict[int | None, int]:
    """Number of a segment -> its layers but the first, with inputs that are made again in the backward pass."""
    counts = Counter(own.segment for own in passes if own.segment is not None)
    return {segment: count - 1 for segment, count in counts.items()}


@dataclass(frozen=True)
class OutsideLayers:
    """Bytes of the values before and behind a model's layers."""

    config: ModelConfig
    batch: BatchShape
    stream: int
    """Bytes of the residual stream."""
    has_tables: bool
    """Whether tables of rotations are kept."""
    has_head: bool
    """Whether the final norm and the loss come behind the layers."""
    trains_embeddings: bool
    """Whether there are gradients of the layers' own embeddings, where they have some."""

    @property
    def throughout(self) -> int:
        """Bytes until the last layer's backward pass ends: token ids, the tables of rotations, and layers' own
        embeddings.
        """
        tables = sum(2 * rope.dim for rope in self.config.ropes) * self.batch.element_bytes * self.has_tables
        return (8 + tables) * self.batch.tokens + self._embeddings

    @property
    def _embeddings(self) -> int:
        """Bytes of layers' own embeddings, and of the product that is normed for them with its statistics."""
        count = self.config.per_layer_columns * self.stream // self.config.hidden_size
        if not self.trains_embeddings:
            return count
        statistics = 4 * len(self.config.layers) * self.stream // (self.config.hidden_size * self.batch.element_bytes)
        return 2 * count + (statistics if count else 0)

    @property
    def until_backward(self) -> int:
        """Bytes until the layers' backward passes begin: the final norm's input, statistics and output (of all tokens,
        where ranks have their own), the states of targets, and the gradient of these; without a head the output, and
        its gradient.
        """
        if not self.has_head:
            return 2 * self.stream
        entered = self.batch.tokens * self.config.hidden_size * self.batch.element_bytes
        return self.until_next_pass + (entered + self._targets if self.config.task == "causal-lm" else 0)

    @property
    def until_next_pass(self) -> int:
        """The bytes of those that stay while another micro-batch has its passes: the final norm's input and statistics
        and the gradient of the states of targets; without a loss by targets the norm's output; without a head the
        output.
        """
        if not self.has_head:
            return self.stream
        statistics = 4 * self.batch.tokens * (1 if self.config.norm_kind == "rms" else 2)
        return self.stream + statistics + (self._targets if self.config.task == "causal-lm" else self.stream)

    @property
    def _targets(self) -> int:
        """Bytes of the states of targets."""
        targets = self.batch.tokens if self.batch.targets is None else self.batch.targets
        return targets * self.config.hidden_size * self.batch.element_bytes

    @property
    def norm_backward(self) -> int:
        """Bytes of the temporaries of the final norm's backward pass, without those of the states of targets."""
        wide = self.stream // self.batch.element_bytes * 4 * self.has_head
        return 3 * wide if self.batch.is_half else wide


@lru_cache(maxsize=2048)
def layer_memory(
    spec: LayerSpec, width: int, batch: BatchShape, training: LayerTraining, recompute: Recompute, share: RankShare
) -> LayerMemory:
    return LayerMemory(LayerGraph(spec, width, batch, training, recompute, share))
