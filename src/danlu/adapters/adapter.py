"""What the adapters of linear layers have in common.

T tokens · O, I outputs and inputs of the layer · D model width
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from danlu.types import Axis, EmbeddingLayer, LinearLayer, LinearShard, Recomputed

TensorAxes = Mapping[str, tuple[Axis | None, ...]]
"""For tensor parallelism: which dimensions of a parameter are cut with the outputs or the inputs of its layer. What is
not named is whole on every process; its gradient there is a part of a sum over them."""


@dataclass(frozen=True)
class Dense:
    """A linear layer written out in full, for merging: float32 or wider."""

    weight: Tensor  # [O, I]
    bias: Tensor | None  # [O]


class Adapter(nn.Module):
    """The adapter of one linear layer. Its parameters are float32, whatever the type of activations.

    Where the layer is cut over processes by its inputs, what goes into the adapter is cut as well, and what it gives is
    a part of a sum.
    """

    @property
    def tensor_axes(self) -> TensorAxes:
        return {}

    def narrow(self, share: LinearShard) -> None:
        """Told that the layer has been cut, once, when its parameters have been cut by `tensor_axes`."""

    def below(self, x: Tensor, recomputed: Recomputed | None = None) -> Tensor:
        """x [T, I] as the layer below this adapter is to have it."""
        return x

    @abstractmethod
    def add(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        """x [T, I], and y [T, O] that the layer below gives for `below(x)` -> [T, O] with this adapter.

        recomputed: how to make x again in the backward pass instead of keeping it.
        """

    @abstractmethod
    def applied(self, dense: Dense) -> Dense:
        """The layer with this adapter in it, from the layer without; differentiable in the adapter's parameters."""


class EmbeddingAdapter(nn.Module):
    """The adapter of an embedding, whose outputs are words here and its inputs what the rows hold."""

    @property
    def tensor_axes(self) -> TensorAxes:
        return {}

    def narrow(self, share: LinearShard) -> None:
        """As that of `Adapter`."""

    @abstractmethod
    def add(self, tokens: Tensor, y: Tensor, embedding: EmbeddingLayer) -> Tensor:
        """tokens [T], and y [T, D] that the layer below gives for them -> [T, D] with this adapter."""

    @abstractmethod
    def applied(self, weight: Tensor) -> Tensor:
        """The embedding [V, D] with this adapter in it."""
