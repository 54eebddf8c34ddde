"""GLM-4: the dense models of 2024 (glm) and of April 2025 (glm4), GLM-4 MoE with the experts of DeepSeek-V3, and GLM-4
MoE Lite (GLM-4.7-Flash), which has DeepSeek-V3's latent attention too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.deepseek import (
    DEEPSEEK_MODULES,
    DEEPSEEK_MOE_MODULES,
    deepseek_experts,
    deepseek_feeds,
    deepseek_keys,
    deepseek_v3_router,
    read_latent,
    write_deepseek_v3,
)
from danlu.models.families.family import GENERATION_ONLY, LLAMA_MODULES, Family
from danlu.models.families.layer_keys import STACKED_MODULES, layer_types, with_feeds, with_windows
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Dense, LayerSpec

GLM_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    "mlp.gate_proj": "mlp.gate_up_proj",  # one under the other, as Phi-3 has them
    "mlp.up_proj": "mlp.gate_up_proj",
}
GLM4_MODULES: dict[str, str] = {
    **GLM_MODULES,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}
_GLM_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}


def read_glm(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    return with_windows(plain, [None] * layers, qkv_bias=hf.flag("attention_bias"), interleaved=True)


def read_glm4(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    return read_glm(hf, replace(plain, norms="sandwich"), layers)


def write_glm(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].attention.qkv_bias}


def read_glm4_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    qk_norm = "head" if hf.flag("use_qk_norm") else None
    windows = [None] * layers
    plain_layers = with_windows(plain, windows, qkv_bias=hf.flag("attention_bias"), qk_norm=qk_norm)["layers"]
    return {"layers": with_feeds(plain_layers, deepseek_feeds(hf, plain, deepseek_v3_router(hf), layers))}


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0].attention
    return {**deepseek_keys(config), "attention_bias": first.qkv_bias, "use_qk_norm": first.qk_norm is not None}


def read_glm4_moe_lite(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if "partial_rotary_factor" in hf and hf.number("partial_rotary_factor") != 1:
        raise hf.error("partial_rotary_factor", "all of qk_rope_head_dim is rotated: only 1 is supported")
    if "mlp_layer_types" in hf:
        types = layer_types(hf, layers, ("dense", "sparse"), key="mlp_layer_types")
    elif "first_k_dense_replace" in hf and hf.integer("first_k_dense_replace") != 1:
        raise hf.error("first_k_dense_replace", "transformers does not read it for this family: give mlp_layer_types")
    else:
        types = ["dense", *["sparse"] * (layers - 1)]
    plain = replace(plain, mixer=read_latent(hf, interleaved=hf.flag("rope_interleave")))
    if "sparse" not in types:
        return {"layers": (plain,) * layers}
    experts = deepseek_experts(hf, plain, deepseek_v3_router(hf))
    return {"layers": with_feeds([plain] * layers, [plain.feed if kind == "dense" else experts for kind in types])}


def write_glm4_moe_lite(config: ModelConfig) -> dict[str, Any]:
    kinds = ["dense" if isinstance(layer.feed, Dense) else "sparse" for layer in config.layers]
    return {**write_deepseek_v3(config), "mlp_layer_types": kinds}


FAMILIES: dict[str, Family] = {
    "glm": Family(
        architecture="Glm",
        read=read_glm,
        write=write_glm,
        modules=GLM_MODULES,
        rope=RopeRules(rotates_part=True),
        defaults=_GLM_DEFAULTS,
    ),
    "glm4": Family(
        architecture="Glm4",
        read=read_glm4,
        write=write_glm,
        modules=GLM4_MODULES,
        rope=RopeRules(rotates_part=True),
        defaults=_GLM_DEFAULTS,
    ),
    "glm4_moe": Family(
        architecture="Glm4Moe",
        aliases={"num_local_experts": "n_routed_experts"},
        architectures=GENERATION_ONLY,
        has_experts=True,
        read=read_glm4_moe,
        write=write_glm4_moe,
        modules=DEEPSEEK_MOE_MODULES,
        stacked_modules=STACKED_MODULES,
        has_mtp=True,
        rope=RopeRules(rotates_part=True),
        mtp_keys=("num_nextn_predict_layers",),
        defaults={
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLite",
        aliases={"num_local_experts": "n_routed_experts"},
        architectures=GENERATION_ONLY,
        has_experts=True,
        has_mtp=True,
        mtp_keys=("num_nextn_predict_layers",),
        read=read_glm4_moe_lite,
        write=write_glm4_moe_lite,
        modules=DEEPSEEK_MODULES,
        stacked_modules=STACKED_MODULES,
        ropes_differ=True,
        defaults={
            "bos_token_id": 0,
            "eos_token_id": 1,
            "head_dim": 64,
            "kv_lora_rank": 512,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "num_key_value_heads": None,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_interleave": True,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "v_head_dim": 256,
        },
    ),
}
