"""Families with linear attention in most layers: Qwen3-Next, and Qwen3.5's language part.

Every fourth layer, or those that layer_types names, has attention by heads with an output gate and partial rotation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family, Stored
from danlu.models.families.layer_keys import QWEN_MOE_MODULES, STACKED_MODULES, interval_of, layer_types, with_feeds
from danlu.models.families.qwen import gated_shared_experts, gated_shared_keys, sparse_layers
from danlu.models.hf_rope import RopeRules, write_rope_parameters
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec, Mixer
from danlu.models.mixer_spec import Delta

GATED_HEADS_MODULES: dict[str, str | Stored] = {
    **QWEN_MOE_MODULES,
    # Each head of queries is followed by the same head of the gate.
    "attention.q_proj": Stored("self_attn.q_proj", turns=lambda layer: layer.attention.heads),
    "attention.gate_proj": Stored("self_attn.q_proj", turns=lambda layer: layer.attention.heads),
}
_DELTA_MODULES: dict[str, str | Stored] = {
    **QWEN_MOE_MODULES,
    "attention": "linear_attn",
    "attention.q_conv1d": "linear_attn.conv1d",
    "attention.k_conv1d": "linear_attn.conv1d",
    "attention.v_conv1d": "linear_attn.conv1d",
    "attention.o_norm": "linear_attn.norm",
    "attention.o_proj": "linear_attn.out_proj",
}
_QKVZ = Stored("linear_attn.in_proj_qkvz", turns=lambda layer: _delta(layer).key_heads)
_BA = Stored("linear_attn.in_proj_ba", turns=lambda layer: _delta(layer).key_heads)
QWEN3_NEXT_DELTA_MODULES: dict[str, str | Stored] = {
    **_DELTA_MODULES,
    # By key heads: what makes its query and key, the values that it serves, and their gates.
    "attention.q_proj": _QKVZ,
    "attention.k_proj": _QKVZ,
    "attention.v_proj": _QKVZ,
    "attention.gate_proj": _QKVZ,
    "attention.b_proj": _BA,
    "attention.a_proj": _BA,
}
QWEN3_5_DELTA_MODULES: dict[str, str | Stored] = {
    **_DELTA_MODULES,
    "attention.q_proj": "linear_attn.in_proj_qkv",
    "attention.k_proj": "linear_attn.in_proj_qkv",
    "attention.v_proj": "linear_attn.in_proj_qkv",
    "attention.gate_proj": "linear_attn.in_proj_z",
    "attention.b_proj": "linear_attn.in_proj_b",
    "attention.a_proj": "linear_attn.in_proj_a",
}
QWEN3_NEXT_DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5_MOE_DEFAULTS: dict[str, Any] = {
    **QWEN3_NEXT_DEFAULTS,
    "intermediate_size": 512,  # which no layer has
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
LINEAR_DEFAULTS: dict[str, Any] = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
LINEAR_ROPE = RopeRules(rotates_part=True)
MTP_KEYS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_TYPES = ("full_attention", "linear_attention")


def _delta(layer: LayerSpec) -> Delta:
    assert isinstance(layer.mixer, Delta), f"{layer.mixer} is no linear attention"
    return layer.mixer


def read_linear(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    """The layers of both kinds, with the plain layer's feed-forward network in each."""
    if hf.flag("attention_bias"):
        raise hf.error("attention_bias", "a gate of attention with a bias is not supported")
    if "attn_output_gate" in hf and not hf.flag("attn_output_gate"):
        raise hf.error("attn_output_gate", "transformers computes this family with the gate alone")
    if plain.feed.activation != "silu":
        raise hf.error("hidden_act", "linear attention is computed with silu alone")
    delta = Delta(
        heads=hf.integer("linear_num_value_heads"),
        key_heads=hf.integer("linear_num_key_heads"),
        key_dim=hf.integer("linear_key_head_dim"),
        value_dim=hf.integer("linear_value_head_dim"),
        conv_width=hf.integer("linear_conv_kernel_dim"),
    )
    attention = replace(plain.attention, qk_norm="head", output_gate=True)
    mixers: dict[str, Mixer] = {"linear_attention": delta, "full_attention": attention}
    return {
        "layers": tuple(replace(plain, mixer=mixers[kind]) for kind in _layer_types(hf, layers)),
        "norm_offset": 1.0,
    }


def _layer_types(hf: HFValues, layers: int) -> list[str]:
    if hf.raw("layer_types") is None:
        every = interval_of(hf, "full_attention_interval")
        return ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)]
    types = layer_types(hf, layers, _TYPES)
    if len(set(types)) < len(_TYPES):
        raise hf.error("layer_types", f"expected layers of both kinds, {' and '.join(_TYPES)}")
    return types


def write_linear(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_linear` reads."""
    delta = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, Delta))
    attention = next(layer.attention for layer in config.layers if not isinstance(layer.mixer, Delta))
    rope = {} if attention.rope is None else write_rope_parameters(attention.rope, attention.head_dim)
    return {
        "attention_bias": False,
        "layer_types": [_TYPES[isinstance(layer.mixer, Delta)] for layer in config.layers],
        "linear_conv_kernel_dim": delta.conv_width,
        "linear_key_head_dim": delta.key_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.heads,
        "linear_value_head_dim": delta.value_dim,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": rope,
    }


def read_linear_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    """The layers of `read_linear`, with experts in all of them or, by the keys for that, in some."""
    common = read_linear(hf, plain, layers)
    feeds = sparse_layers(hf, plain, gated_shared_experts(hf, plain), layers)
    return {**common, "layers": with_feeds(common["layers"], feeds)}


def write_linear_moe(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_linear_moe` reads."""
    return {**write_linear(config), **gated_shared_keys(config)}


def read_qwen3_5_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    """Reads as `read_linear_moe`; transformers has experts in every layer, and divides their weights by their sum."""
    if hf.raw("mlp_only_layers") or hf.integer("decoder_sparse_step") != 1 or not hf.flag("norm_topk_prob"):
        key = next(key for key in ("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob") if key in hf)
        raise hf.error(key, "transformers has no such key for this family: all its layers have the same experts")
    return read_linear_moe(hf, plain, layers)


def write_qwen3_5_moe(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_qwen3_5_moe` reads."""
    unknown = ("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
    return {key: value for key, value in write_linear_moe(config).items() if key not in unknown}


FAMILIES: dict[str, Family] = {
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5Moe",
        architectures=GENERATION_ONLY,
        has_experts=True,
        read=read_qwen3_5_moe,
        write=write_qwen3_5_moe,
        modules=GATED_HEADS_MODULES,
        rope=LINEAR_ROPE,
        linear_modules=QWEN3_5_DELTA_MODULES,
        stacked_modules=STACKED_MODULES,
        has_mtp_module=True,
        mtp_keys=MTP_KEYS,
        defaults={**LINEAR_DEFAULTS, **QWEN3_5_MOE_DEFAULTS},
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5",
        architectures={"sequence-classification": "Qwen3_5TextForSequenceClassification", "token-classification": None},
        read=read_linear,
        write=write_linear,
        modules=GATED_HEADS_MODULES,
        rope=LINEAR_ROPE,
        linear_modules=QWEN3_5_DELTA_MODULES,
        has_mtp_module=True,
        mtp_keys=MTP_KEYS,
        defaults=LINEAR_DEFAULTS,
    ),
    "qwen3_next": Family(
        architecture="Qwen3Next",
        has_experts=True,
        has_mtp=True,
        read=read_linear_moe,
        write=write_linear_moe,
        modules=GATED_HEADS_MODULES,
        rope=LINEAR_ROPE,
        linear_modules=QWEN3_NEXT_DELTA_MODULES,
        stacked_modules=STACKED_MODULES,
        has_mtp_module=True,
        defaults={**LINEAR_DEFAULTS, **QWEN3_NEXT_DEFAULTS, "num_key_value_heads": 2},
    ),
}
