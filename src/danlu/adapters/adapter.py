"""What the adapters of linear layers have in common.

T tokens · O, I outputs and inputs of the layer · D model width
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from danlu.types import EmbeddingLayer, LinearLayer, Remade


@dataclass(frozen=True)
class Dense:
    """A linear layer written out in full, for merging: float32 or wider."""

    weight: Tensor  # [O, I]
    bias: Tensor | None  # [O]


class Adapter(nn.Module):
    """The adapter of one linear layer. Its parameters are float32, whatever the type of activations."""

    def below(self, x: Tensor, remade: Remade | None = None) -> Tensor:
        """x [T, I] as the layer below this adapter is to have it."""
        return x

    @abstractmethod
    def add(self, x: Tensor, y: Tensor, linear: LinearLayer, remade: Remade | None = None) -> Tensor:
        """x [T, I], and y [T, O] that the layer below gives for `below(x)` -> [T, O] with this adapter.

        remade: how to make x again in the backward pass instead of keeping it.
        """

    @abstractmethod
    def applied(self, dense: Dense) -> Dense:
        """The layer with this adapter in it, from the layer without; differentiable in the adapter's parameters."""


class EmbeddingAdapter(nn.Module):
    """The adapter of an embedding."""

    @abstractmethod
    def add(self, tokens: Tensor, y: Tensor, embedding: EmbeddingLayer) -> Tensor:
        """tokens [T], and y [T, D] that the layer below gives for them -> [T, D] with this adapter."""

    @abstractmethod
    def applied(self, weight: Tensor) -> Tensor:
        """The embedding [V, D] with this adapter in it."""
