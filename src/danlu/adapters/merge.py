"""The active adapters of a model merged into its weights, in float32 or wider, and rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.adapters.adapter import DenseLinear, in_float32
from danlu.adapters.adapter_set import AdapterSet, dense_linear
from danlu.adapters.slot import EmbeddingSlot, Slot
from danlu.core.errors import ModelError

UNMERGEABLE_KINDS = ("bottleneck", "prefix", "prompt")
"""Kinds of adapters that no other weights of the same architecture can express."""


def check_mergeable(adapters: AdapterSet) -> None:
    """Raises ModelError if an active adapter is of a kind that is no change of weights."""
    for name in adapters.active:
        if (kind := adapters.added[name].section.kind) in UNMERGEABLE_KINDS:
            raise ModelError(
                f"adapter {name!r} ({kind}) changes what flows through the model, not its weights: it cannot be "
                "merged. Keep it as an adapter folder next to the base"
            )


@torch.no_grad()
def merged_parameter(adapters: AdapterSet, name: str) -> Tensor:
    """One parameter of the base with the active adapters merged into it, in float32 or wider.

    The parameter itself where no adapter changes it and it has that type. Raises ModelError for adapters that are no
    change of weights.
    """
    check_mergeable(adapters)
    if adapters.tied and name == "lm_head.weight":
        adapters.head_as_linear()
    owner_name, _, attribute = name.rpartition(".")
    owner: Any = adapters.model.get_submodule(owner_name)
    slot = getattr(owner, "adapter", None)
    if not isinstance(slot, Slot) and getattr(owner, "quantized", None) is None:
        return in_float32(getattr(owner, attribute))
    merged: Tensor | None = getattr(_merged_layer(owner), attribute)
    assert merged is not None, f"{name} is not a parameter of the layer"
    return merged


def _merged_layer(layer: Any) -> DenseLinear:
    """The weight and bias of a linear layer or an embedding with the active adapters merged into them."""
    if isinstance(layer.adapter, EmbeddingSlot):
        return DenseLinear(layer.adapter.merged_into(in_float32(layer.weight)), None)
    dense = dense_linear(layer)
    return dense if layer.adapter is None else layer.adapter.merged_into(dense)


@torch.no_grad()
def unties_head(adapters: AdapterSet) -> bool:
    """Whether the base ties its head to the embedding, and with the active adapters the two are different."""
    if not adapters.tied:
        return False
    if getattr(adapters.model, "lm_head", None) is None:
        embedding: Any = adapters.model.get_submodule("embed_tokens")
        return isinstance(embedding.adapter, Slot) and bool(embedding.adapter.stack())
    return not torch.equal(
        merged_parameter(adapters, "lm_head.weight"), merged_parameter(adapters, "embed_tokens.weight")
    )


@torch.no_grad()
def merge_weights(adapters: AdapterSet) -> None:
    """Merges the active adapters into the weights, one layer after the other, and takes all slots of weights out.

    Each weight is rounded once, to the type in which the base has it. There is no way back.
    """
    check_mergeable(adapters)
    if unties_head(adapters):
        adapters.head_as_linear()
    owners: list[Any] = [
        module for module in adapters.model.modules() if isinstance(getattr(module, "adapter", None), Slot)
    ]
    for owner in owners:
        slot, bias = owner.adapter, getattr(owner, "bias", None)
        if slot.stack():
            stored = owner.quantized.dtype if owner.weight is None else owner.weight.dtype
            merged = _merged_layer(owner)
            if owner.weight is None:
                owner.quantized = None  # the merged weight is dense
            owner.weight = Parameter(merged.weight.to(stored), requires_grad=False)
            if bias is not None and merged.bias is not None:
                owner.bias = Parameter(merged.bias.to(bias.dtype), requires_grad=False)
        owner.adapter = None


def merge_and_unload(adapters: AdapterSet) -> None:
    """Merges the active adapters into the weights, takes every adapter out, and makes all parameters trainable.

    Raises ModelError where the result is no model of this architecture: a tied head that differs from its embedding.
    """
    if unties_head(adapters):
        raise ModelError(
            "the adapters train the head apart from the embedding, to which the base ties it. Merge them first "
            "(`danlu merge`), which writes a model with a head of its own"
        )
    merge_weights(adapters)
    if adapters.tied:
        adapters.model.lm_head = None  # type: ignore[assignment]
    adapters.added, adapters.active = {}, ()
    adapters.model.requires_grad_(True)
