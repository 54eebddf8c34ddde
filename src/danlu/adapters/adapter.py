"""The base classes of adapters of linear layers, of experts' layers and of embeddings.

T tokens · O, I outputs and inputs of the layer · V vocabulary · D model width · E experts · N rows of their tokens
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from danlu.adapters.shapes import AdapterTensor
from danlu.core.layer_types import Axis, EmbeddingLayer, GroupedLayer, LinearLayer, LinearShard, Recomputed

TensorAxes = Mapping[str, tuple[Axis | None, ...]]
"""Whether tensor parallelism cuts each dimension of a parameter with the outputs or the inputs of its layer.

A parameter that is not named is whole on every process, and its gradient there is one term of a sum over them.
"""

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class DenseLinear:
    """The weight and bias of a linear layer without quantization or adapter; float32 or wider."""

    weight: Tensor  # [O, I]; of experts [E, O, I]
    bias: Tensor | None  # [O]; of experts [E, O]


class ShardableModule(nn.Module):
    """A module in a slot of a layer that tensor parallelism may cut."""

    @property
    def tensor_axes(self) -> TensorAxes:
        """How its parameters are cut with the layer; those without an entry stay whole."""
        return {}

    def narrow(self, shard: LinearShard) -> None:
        """Called once, after tensor parallelism has cut the layer, and this module's parameters by `tensor_axes`."""


class Adapter(ShardableModule):
    """The adapter of one linear layer. Its parameters are float32, whatever the type of activations.

    Where the layer is cut over processes by its inputs, the adapter sees only the inputs of this process, and its
    result is one term of a sum over the processes.
    """

    def adapt_input(self, x: Tensor, recomputed: Recomputed | None = None) -> Tensor:
        """x [T, I] -> the input of the layer below this adapter, [T, I]; x itself unless overridden."""
        return x

    @abstractmethod
    def adapt_output(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        """Returns the layer's output with this adapter, [T, O].

        Args:
            x: [T, I], the input of layer and adapter together.
            y: [T, O], the output of the layer below this adapter for `adapt_input(x)`.
            recomputed: how to compute x again in the backward pass instead of keeping it.
        """

    @abstractmethod
    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        """The layer with this adapter merged into its weight and bias; differentiable in the adapter's parameters."""


class GroupedLinearAdapter(ShardableModule):
    """The adapter of the stacked linear layers of experts.

    Its parameters [E, ..] are float32 and distributed with the experts; where the layers are cut over processes by
    their inputs, its result is a term of a sum.
    """

    @abstractmethod
    def adapt_output(self, x: Tensor, y: Tensor, counts: Tensor, linear: GroupedLayer) -> Tensor:
        """x [N, I] by expert, counts [E] of each, and y [N, O], the output of the layers below this adapter -> [N, O]
        with this adapter.
        """

    @abstractmethod
    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        """The layers with this adapter merged into their weights and biases."""


class EmbeddingAdapter(ShardableModule):
    """The adapter of an embedding. For tensor parallelism, its vocabulary counts as outputs and its width as inputs."""

    @abstractmethod
    def adapt_output(self, tokens: Tensor, y: Tensor, embedding: EmbeddingLayer) -> Tensor:
        """tokens [T] and y [T, D], the output of the embedding below this adapter -> [T, D] with this adapter."""

    @abstractmethod
    def merged_into(self, weight: Tensor) -> Tensor:
        """The embedding [V, D] with this adapter merged into it."""


def in_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 where it is that; itself where nothing changes."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def saved_inputs(x: Tensor, recomputed: Recomputed | None) -> tuple[Tensor, ...]:
    """Returns the tensors that an operation saves to have x in its backward pass: x, or the inputs that
    recompute it.
    """
    return (x,) if recomputed is None else recomputed.inputs


def new_parameter(tensor: AdapterTensor, device: torch.device | str) -> nn.Parameter:
    """A parameter of that shape, uninitialised."""
    return nn.Parameter(torch.empty(tensor.shape, device=device), requires_grad=tensor.trained)


def embedding_of(tensor: AdapterTensor, device: torch.device | str) -> nn.Embedding:
    """A trained embedding of that shape, uninitialised."""
    return nn.Embedding.from_pretrained(torch.empty(tensor.shape, device=device), freeze=False)


def module_of_type(module: nn.Module, kind: type[_Module]) -> _Module:
    """`module` itself, for the type checker; asserts that it is of this kind."""
    assert isinstance(module, kind), f"{type(module).__name__} where {kind.__name__} was expected"
    return module
