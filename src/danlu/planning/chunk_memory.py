"""The bytes of a micro-batch's passes through each chunk of a pipeline, from those of its layers. Imports no torch.

The executor keeps a chunk's output until the chunk's backward pass is over, and until then the gradient that has come
for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from danlu.models.config import ModelConfig
from danlu.models.operations import ROTATION
from danlu.planning.activation_memory import (
    ActivationPlan,
    LayerPass,
    OutsideLayers,
    inputs_again,
    kept_by_layer,
    layer_memory,
)
from danlu.planning.batch_shape import BatchShape
from danlu.planning.layer_memory import LayerMemory, PassBytes
from danlu.planning.step_walk import ChunkCost


@dataclass(frozen=True)
class ChunkGradients:
    """Bytes of the gradients of one chunk's weights on a rank."""

    total: int
    embedding: int = 0
    """The bytes of the embedding's, where it is there and a pass makes all of its rows."""
    head: int = 0
    """The bytes of the head's, where it is there: the loss makes it in the forward pass."""


def chunk_memory(
    config: ModelConfig, batch: BatchShape, plan: ActivationPlan, gradients: ChunkGradients, loss_workspace: int
) -> ChunkCost:
    """The bytes of one chunk; seconds, and bytes that are gathered, are left to the caller.

    config: the model with the chunk's layers alone. plan: of these layers, none of which is offloaded; with a head of
    the last chunk. loss_workspace: bytes of the loss in addition to its inputs and the head's gradient.
    """
    assert not plan.offload, "offloaded activations are not kept on the device"
    passes = plan.layers or (LayerPass(),) * len(config.layers)
    layers = [
        layer_memory(spec, config.hidden_size, batch, own.training, own.recompute, plan.share)
        for spec, own in zip(config.layers, passes, strict=True)
    ]
    width = batch.tokens * config.hidden_size * batch.element_bytes
    stream = -(-width // plan.share.degree) if plan.share.sequence else width
    has_tables = any(ROTATION in layer.graph.kept.names for layer in layers)
    trains_embeddings = any(own.training.trains_embeddings for own in passes)
    outside = OutsideLayers(config, batch, stream, has_tables, plan.has_head, trains_embeddings)
    return _Chunk(layers, passes, outside, gradients).cost(loss_workspace)


@dataclass(frozen=True)
class _Chunk:
    layers: Sequence[LayerMemory]
    passes: Sequence[LayerPass]
    outside: OutsideLayers
    gradients: ChunkGradients

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the loss come behind the layers."""
        return self.outside.has_head

    def cost(self, loss_workspace: int) -> ChunkCost:
        """The bytes of the chunk's passes."""
        layers = self.layers
        waiting = [layer.put_off_bytes[0] for layer in layers]
        put_off = [layer.put_off_bytes[1] for layer in layers]
        weight_peak, first_weight = self._weight_pass()
        return ChunkCost(
            kept=self.kept,
            forward_peak=max([self.kept, *map(sum, self._moments([PassBytes(each.forward, 0) for each in layers]))]),
            loss=self._during_loss + loss_workspace if self.is_last else 0,
            backward_peak=self._backward([PassBytes(each.backward, 0) for each in layers], stays=False).activations,
            first_backward=self._backward([each.first_backward for each in layers], stays=True),
            input_peak=self._backward(
                [PassBytes(each.input, 0) for each in layers], stays=False, waiting=waiting
            ).activations,
            kept_for_weight=sum(waiting),
            weight_peak=weight_peak,
            first_weight=first_weight,
            gradients=self.gradients.total,
            gradients_of_input=self.gradients.total - sum(put_off),
            gradients_of_forward=self.gradients.head,
            message=0 if self.is_last else self._stream,
        )

    @property
    def kept(self) -> int:
        """Bytes from the forward to the backward pass."""
        return sum(self._kept) + self.outside.throughout + self.outside.until_next_pass

    @property
    def _during_loss(self) -> int:
        """Bytes that are there in addition to the kept ones while the loss is computed, and in the norm's backward
        pass."""
        return self.outside.until_backward - self.outside.until_next_pass

    @property
    def _stream(self) -> int:
        return self.outside.stream

    @cached_property
    def _kept(self) -> list[int]:
        return kept_by_layer(self.layers, self.passes)

    def _moments(self, passes: Sequence[PassBytes], behind: Sequence[int] | None = None) -> list[PassBytes]:
        """The passes of layers with all that is there meanwhile: what layers in front of each keep, and `behind`."""
        before = itertools.accumulate(self._kept, initial=self.outside.throughout)
        behind = behind or [self._stream] * len(passes)
        return [
            PassBytes(own.activations + kept + more, own.gradients)
            for own, kept, more in zip(passes, before, behind, strict=False)
        ]

    def _backward(self, passes: Sequence[PassBytes], *, stays: bool, waiting: Sequence[int] | None = None) -> PassBytes:
        """The fullest moment of a backward pass.

        stays: whether gradients stay that were not there before. waiting: bytes that each layer puts off.
        """
        gradients = [layer.gradients if stays else 0 for layer in self.layers]
        embedding = self.gradients.embedding
        first = self.gradients.total - embedding - sum(gradients) if stays else 0  # of the norm and the head
        again, put_off = inputs_again(self.passes), waiting or [0] * len(passes)
        # The output, and the gradient that came for it, which is among the last layer's own bytes.
        output = 0 if self.is_last else 2 * self._stream
        behind, staying = [], []
        for index, settings in enumerate(self.passes):
            own_output = output - (self._stream if output and index == len(passes) - 1 else 0)
            behind.append(own_output + sum(put_off[index + 1 :]) + self._stream * again.get(settings.segment, 0))
            staying.append(first + sum(gradients[index + 1 :]))
        moments = [
            PassBytes(activations, own + there)
            for (activations, own), there in zip(self._moments(passes, behind), staying, strict=True)
        ]
        if self.is_last:
            moments.append(PassBytes(self.kept + self._during_loss + self.outside.norm_backward, first))
        if embedding:
            at_end = self.outside.throughout + output + sum(put_off) + self._stream
            moments.append(PassBytes(at_end + (0 if stays else embedding), first + sum(gradients) + embedding * stays))
        return max([PassBytes(self.kept, first), *moments], key=sum)

    def _weight_pass(self) -> tuple[int, PassBytes]:
        """The fullest moments of a weight pass, and of the one that makes the gradients first."""
        entries = [each for layer in reversed(self.layers) for each in layer.put_off]
        left, staying, peak, first = sum(each.frees for each in entries), 0, 0, PassBytes(0, 0)
        for each in entries:
            staying += each.gradient
            peak = max(peak, left + each.gradient + each.narrow)
            first = max(first, PassBytes(left + each.narrow, staying), key=sum)
            left -= each.frees
        return peak, first
