"""Granite 3, Granite MoE, and the models of Granite 4 that are attention throughout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, LLAMA_MODULES, Family, Stored
from danlu.models.families.layer_keys import (
    attention_biases,
    local_expert_keys,
    routed_experts,
    with_windows,
)
from danlu.models.families.llama import read_llama, write_llama
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Dense, Experts, LayerSpec, Router

GRANITE_MOE_MODULES: dict[str, str | Stored] = {
    **LLAMA_MODULES,
    "mlp.experts.gate_proj.weight": Stored("block_sparse_moe.input_linear.weight"),
    "mlp.experts.up_proj.weight": Stored("block_sparse_moe.input_linear.weight"),
    "mlp.experts.down_proj.weight": Stored("block_sparse_moe.output_linear.weight"),
    "mlp.router": "block_sparse_moe.router.layer",
}
GRANITE_STACKED_MODULES: dict[str, str | Stored] = {
    "mlp.experts.gate_proj.weight": Stored("block_sparse_moe.experts.gate_up_proj"),
    "mlp.experts.up_proj.weight": Stored("block_sparse_moe.experts.gate_up_proj"),
    "mlp.experts.down_proj.weight": Stored("block_sparse_moe.experts.down_proj"),
    "mlp.router": "block_sparse_moe.router",
}
GRANITE_HYBRID_MODULES: dict[str, str | Stored] = {
    **GRANITE_MOE_MODULES,
    **{
        f"{feed}.{own}": f"shared_mlp.{name}"
        for feed in ("mlp", "mlp.shared")
        for own, name in (("gate_proj", "input_linear"), ("up_proj", "input_linear"), ("down_proj", "output_linear"))
    },
}
_ATTENTION = ("attention", "full_attention")
_MAMBA_HEADS = 128


def read_granite(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    return _with_multipliers(hf, read_llama(hf, plain, layers)["layers"])


def _with_multipliers(hf: HFValues, layers: tuple[LayerSpec, ...]) -> dict[str, Any]:
    divisor = hf.number("logits_scaling")
    if divisor == 0:
        raise hf.error("logits_scaling", "logits cannot be divided by 0")
    scale = hf.number("attention_multiplier")
    return {
        "layers": tuple(replace(layer, mixer=replace(layer.attention, scale=scale)) for layer in layers),
        "embedding_multiplier": hf.number("embedding_multiplier"),
        "residual_multiplier": hf.number("residual_multiplier"),
        "logits_divisor": divisor,
    }


def write_granite(config: ModelConfig) -> dict[str, Any]:
    return {**write_llama(config), **_multipliers(config)}


def _multipliers(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_multiplier": config.layers[0].attention.attention_scale,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }


def read_granitemoe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    plain = replace(plain, feed=_experts(hf, plain))
    return _with_multipliers(hf, with_windows(plain, [None] * layers, **attention_biases(hf))["layers"])


def _experts(hf: HFValues, plain: LayerSpec) -> Experts:
    """The softmax over the logits of the chosen experts is that over all, divided by their sum."""
    return routed_experts(hf, plain, Router(normalise=True))


def write_granitemoe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_multipliers(config),
        **local_expert_keys(config),
        "attention_bias": config.layers[0].attention.qkv_bias,
    }


def read_granitemoehybrid(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    _check_layer_types(hf, layers)
    shared = Dense(hf.integer("shared_intermediate_size"), plain.feed.activation)
    feed = replace(_experts(hf, plain), shared=shared) if hf.integer("num_local_experts") else shared
    rope = plain.attention.rope if hf.raw("position_embedding_type") == "rope" else None
    plain = replace(plain, feed=feed)
    attention = with_windows(plain, [None] * layers, **attention_biases(hf), rope=rope)
    return _with_multipliers(hf, attention["layers"])


def _check_layer_types(hf: HFValues, layers: int) -> None:
    """Raises ModelError unless every layer is attention; transformers takes state-space models where none is named."""
    types = hf.raw("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise hf.error("layer_types", f"expected a list with one entry for each of {layers} layers, found {types!r}")
    if types is None or any(kind not in _ATTENTION for kind in types):
        problem = "missing, which stands for layers that are all state-space models (Mamba)"
        if types is not None:
            others = sum(kind not in _ATTENTION for kind in types)
            problem = f"{others} layers of {layers} are no attention but state-space models (Mamba)"
        raise hf.error(
            "layer_types",
            f"{problem}, which danlu has no kernels for; models of this family that are attention "
            "throughout are supported (granite-4.0-micro)",
        )


def write_granitemoehybrid(config: ModelConfig) -> dict[str, Any]:
    feed = config.layers[0].feed
    if isinstance(feed, Experts):
        assert feed.shared is not None, "the experts of this family have a shared one"
        experts = local_expert_keys(config) | {"shared_intermediate_size": feed.shared.intermediate_size}
    else:
        experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": feed.intermediate_size}
    return {
        **_multipliers(config),
        **experts,
        "attention_bias": config.layers[0].attention.qkv_bias,
        "position_embedding_type": "rope" if config.ropes else "nope",
        "layer_types": ["attention"] * len(config.layers),
        # Of no layer, but transformers wants it to divide twice the model's width.
        "mamba_n_heads": math.gcd(_MAMBA_HEADS, 2 * config.hidden_size),
    }


_DEFAULTS: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "bos_token_id": 1,
    "embedding_multiplier": 1.0,
    "eos_token_id": 2,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "residual_multiplier": 1.0,
}
_EXPERT_DEFAULTS: dict[str, Any] = {**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    "granite": Family(
        architecture="Granite",
        architectures=GENERATION_ONLY,
        read=read_granite,
        write=write_granite,
        defaults=_DEFAULTS,
    ),
    "granitemoe": Family(
        architecture="GraniteMoe",
        architectures=GENERATION_ONLY,
        has_experts=True,
        experts_module="block_sparse_moe.experts",
        read=read_granitemoe,
        write=write_granitemoe,
        modules=GRANITE_MOE_MODULES,
        stacked_modules=GRANITE_STACKED_MODULES,
        defaults=_EXPERT_DEFAULTS,
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybrid",
        aliases={"layers_block_type": "layer_types"},
        architectures=GENERATION_ONLY,
        has_experts=True,
        experts_module="block_sparse_moe.experts",
        read=read_granitemoehybrid,
        write=write_granitemoehybrid,
        modules=GRANITE_HYBRID_MODULES,
        stacked_modules=GRANITE_STACKED_MODULES,
        defaults={**_EXPERT_DEFAULTS, "shared_intermediate_size": 1024},
    ),
}
