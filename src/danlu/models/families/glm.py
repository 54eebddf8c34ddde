"""GLM-4: the dense models of 2024 (glm) and of April 2025 (glm4), and GLM-4 MoE with the experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.deepseek import DEEPSEEK_MOE_MODULES, deepseek_feeds, deepseek_keys, deepseek_v3_router
from danlu.models.families.family import GENERATION_ONLY, LLAMA_MODULES, Family
from danlu.models.families.layer_keys import STACKED_MODULES, with_feeds, with_windows
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec

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
}
