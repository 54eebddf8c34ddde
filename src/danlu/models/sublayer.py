"""The declarations of a decoder layer's two sublayers, attention and feed-forward network.

Tensor parallelism, recomputation and adapters read these declarations and know no class: another attention (latent), or
another feed-forward network (a mixture of experts) is a file with a class that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from danlu.core.layer_types import Attend, LayerCache
from danlu.models.rope import Rotation

Role = Literal["column", "grouped", "row", "vocabulary", "whole"]
"""How a matrix may be cut over processes: by its outputs (grouped: where there are fewer heads than processes, several
hold the same head), by its inputs, by rows of the vocabulary, or not at all: its gradient is then a sum over processes.
"""

RecomputePoints = Mapping[Literal["elementwise", "selective"], Sequence[str]]
"""Kind of recomputation -> the functions between products, from the module on ("q_norm.forward"), with outputs that are
dropped and computed again in the backward pass. A path may lead to a module that is None."""

BoundaryOp = Callable[[Tensor], Tensor]
"""An operation on activations that enter or leave the part of a model that is cut over processes."""


def identity(x: Tensor) -> Tensor:
    """x: at a boundary that nothing is cut at."""
    return x


class Sublayer(Protocol):
    """Attention or feed-forward network as parallelism, recomputation and adapters see it; an `nn.Module`, too."""

    tensor_slots: ClassVar[Mapping[str, str]]
    """Slot of an adapter, parameter [H], or convolution -> the linear layer with which it is cut, by its outputs or
    heads.
    """
    recompute_points: ClassVar[RecomputePoints]

    @property
    def tensor_roles(self) -> Mapping[str, Role]:
        """The linear layers, and grouped ones, by name ("experts.gate_proj"), in the order of the forward pass.

        Other parameters that are in no slot are held whole by every process, and their gradients are sums over
        processes.
        """
        ...

    @property
    def tensor_norms(self) -> Mapping[str, str]: ...  # norm over all outputs of a linear layer, which is cut with them

    @property
    def tensor_unit(self) -> int | Mapping[str, int]:
        """Features of a cut dimension that stay together, those of a head; by linear layer where they differ."""
        ...


class AttentionSublayer(Sublayer, Protocol):
    """x [T, D]; rotations: of each of the model's rotary embeddings, in x's dtype -> [T, D]."""

    @property
    def cache(self) -> LayerCache: ...

    def __call__(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor: ...


class FeedForwardSublayer(Sublayer, Protocol):
    """x [T, D] -> [T, D], token by token."""

    def __call__(self, x: Tensor) -> Tensor: ...
