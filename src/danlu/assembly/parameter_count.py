"""Counts of a placed model's parameters: all, the trained ones, and the bytes that a process holds."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from torch import nn

from danlu.core.dtensor import local_tensor
from danlu.models.decoder import Decoder
from danlu.models.loading import meta_decoder
from danlu.parallel.local_parameter import LocalParameter


def model_bytes(model: Decoder) -> int:
    """Bytes that this process holds of a model: weights, codes and adapters; a tied matrix counts once."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def parameters_of(model: nn.Module, local: Mapping[str, LocalParameter] = MappingProxyType({})) -> int:
    """All parameters of the whole model and its adapters, quantized ones included; a tied matrix counts once.

    local: this process's shard of each parameter, where several share them.
    """
    counts = _counts(model, local)
    if isinstance(model, Decoder):  # a quantized or cut matrix does not say how large it was
        counts |= {name: parameter.numel() for name, parameter in meta_decoder(model.config).named_parameters()}
    return sum(counts.values())


def trained_parameters_of(model: nn.Module, local: Mapping[str, LocalParameter] = MappingProxyType({})) -> int:
    """Those of `parameters_of` that training changes."""
    return sum(_counts(model, local, trained=True).values())


def _counts(model: nn.Module, local: Mapping[str, LocalParameter], *, trained: bool = False) -> dict[str, int]:
    """The numbers in each whole parameter, by name; the codes of quantized weights are no parameters."""
    elsewhere = {
        name: prod(parameter.box.global_shape)
        for name, parameter in local.items()
        if parameter.parameter.is_meta and (parameter.parameter.requires_grad or not trained)
    }
    return elsewhere | {
        name: prod(local[name].box.global_shape) if name in local else parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and (parameter.requires_grad or not trained)
    }
