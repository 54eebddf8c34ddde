"""OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family
from danlu.models.families.layer_keys import (
    QWEN_MOE_MODULES,
    STACKED_MODULES,
    attention_biases,
    experts_of,
    layer_types_of,
    one_window,
    ropes_by_type,
    routed_experts,
    windows_by_type,
    with_ropes,
    with_windows,
)
from danlu.models.hf_rope import RopeRules, read_ropes_by_type, write_rope_parameters
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec, Router

POST_NORM_MODULES: dict[str, str] = {
    "attention": "self_attn",
    "mlp": "mlp",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
OLMO3_ROPE = RopeRules(("linear", "dynamic", "llama3", "yarn"), theta=500_000.0)


def read_olmo2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    plain = replace(plain, norms="post")
    return with_windows(plain, [None] * layers, **attention_biases(hf), qk_norm="full")


def write_olmo2(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].attention.qkv_bias}


def read_olmo3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    window = hf.optional_integer("sliding_window")
    if "rope_theta" in hf and hf.number("rope_theta") != OLMO3_ROPE.theta:
        # transformers 4 turns all layers by it, transformers 5 only those without a window.
        raise hf.error("rope_theta", "is ambiguous for this family; say it for each type of layer in rope_parameters")
    ropes = read_ropes_by_type(hf, plain.attention.head_dim, OLMO3_ROPE, local_theta=("rope_theta", OLMO3_ROPE.theta))
    repeated = [window if (layer + 1) % 4 else None for layer in range(layers)]
    windows = windows_by_type(hf, layers, absent=repeated)
    plain = replace(plain, norms="post")
    return {"layers": with_ropes(plain, windows, ropes, **attention_biases(hf), qk_norm="full")}


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    full, sliding = ropes_by_type(config)
    head_dim = config.layers[0].attention.head_dim
    by_type = {"full_attention": full, "sliding_attention": sliding}
    given = {kind: write_rope_parameters(rope, head_dim) for kind, rope in by_type.items() if rope is not None}
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": given,
        "attention_bias": config.layers[0].attention.qkv_bias,
        "sliding_window": one_window(config),
        "layer_types": layer_types_of(config),
    }


def read_olmoe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if hf.optional_number("clip_qkv") is not None:
        raise hf.error("clip_qkv", "queries, keys and values that are clipped are not supported")
    experts = routed_experts(hf, plain, Router(normalise=hf.flag("norm_topk_prob")))
    plain = replace(plain, feed=experts)
    return with_windows(plain, [None] * layers, **attention_biases(hf), qk_norm="full")


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "attention_bias": config.layers[0].attention.qkv_bias,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
    }


FAMILIES: dict[str, Family] = {
    "olmo2": Family(
        architecture="Olmo2",
        architectures={"token-classification": None},
        read=read_olmo2,
        write=write_olmo2,
        modules=POST_NORM_MODULES,
        defaults={
            "eos_token_id": 50279,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "olmo3": Family(
        architecture="Olmo3",
        architectures={"token-classification": None},
        read=read_olmo3,
        write=write_olmo3,
        modules=POST_NORM_MODULES,
        rope=OLMO3_ROPE,
        ropes_differ=True,
        defaults={
            "eos_token_id": 50279,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
    ),
    "olmoe": Family(
        architecture="Olmoe",
        aliases={"num_local_experts": "num_experts"},
        architectures=GENERATION_ONLY,
        has_experts=True,
        read=read_olmoe,
        write=write_olmoe,
        modules=QWEN_MOE_MODULES,
        stacked_modules=STACKED_MODULES,
        defaults={
            "eos_token_id": 50279,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_key_value_heads": None,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
}
