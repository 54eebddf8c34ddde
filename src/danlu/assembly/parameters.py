"""The parameters of a run: the adapter and the model that they belong to by name, counts, and those that stay whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from torch import nn

from danlu.core.dtensor import local_tensor
from danlu.core.types import Role
from danlu.models.decoder import Decoder
from danlu.models.loading import meta_decoder
from danlu.models.modules import LayerNorm, RMSNorm
from danlu.parallel.local_parameter import LocalParameter
from danlu.recipe.value import VALUE

_SCORE_HEAD = "objective.score."
_TOKEN_ROWS = ".token_rows"
"""The end of the names of adapters' rows of single tokens, of embedding and head."""


def role_of(name: str) -> Role:
    """The model that a trained parameter belongs to: the value model, or the policy.

    The value model has the score head, names that begin with `value.`, and the adapter `value` of any module.
    """
    return VALUE if name.startswith(_SCORE_HEAD) or VALUE in name.split(".") else "policy"


def own_name(name: str) -> str:
    """The name of a value decoder's parameter in optimizer and checkpoints."""
    return f"{VALUE}.{name}"


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


def kept_whole(model: Decoder) -> set[str]:
    """Names of the parameters that are not sharded among data ranks.

    They are the weights of norms and routers, which are few and used in float32, and parameters that adapters of
    several layers share, for FSDP2 shards a parameter with one layer; so may embedding and head share rows of tokens.
    """
    kinds: tuple[type[nn.Module], ...] = (RMSNorm, LayerNorm)
    if model.config.has_experts:
        from danlu.models.experts import Router

        kinds = (*kinds, Router)
    modules = (module for module in model.modules() if isinstance(module, kinds))
    in_float32 = {weight for module in modules for weight in module.parameters()}
    layers_of = Counter(parameter for layer in model.layers.values() for parameter in layer.parameters())
    named = model.named_parameters(remove_duplicate=False)
    return {
        name
        for name, parameter in named
        if parameter in in_float32 or layers_of[parameter] > 1 or name.endswith(_TOKEN_ROWS)
    }
