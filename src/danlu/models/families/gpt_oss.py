"""gpt-oss: attention with sinks, experts with biases and a clamped activation, stacked on disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import LLAMA_MODULES, Family, Stored
from danlu.models.families.layer_keys import (
    alternating_windows,
    attention_biases,
    experts_of,
    layer_types_of,
    local_expert_keys,
    one_window,
    routed_experts,
    with_windows,
)
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import ClampedSwiGLU, LayerSpec, Router

GPT_OSS_MODULES: dict[str, str | Stored] = {
    **LLAMA_MODULES,
    **{
        f"mlp.experts.{own}.{kind}": Stored(f"mlp.experts.{name}{suffix}", transposed=True, alternates=True)
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
        for own, name in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj"))
    },
}
GPT_OSS_ROPE = RopeRules(theta=150_000.0)
GPT_OSS_ROPE_PARAMETERS: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' values where a config has no rotary settings."""


def read_gpt_oss(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    experts = replace(
        # The k highest logits, then softmax over these: the same weights as of all experts divided by their sum.
        routed_experts(hf, plain, Router(normalise=True, bias=True)),
        activation=ClampedSwiGLU(hf.number("swiglu_alpha"), hf.number("swiglu_limit")),
        bias=True,
    )
    plain = replace(plain, feed=experts)
    return with_windows(plain, alternating_windows(hf, layers), **attention_biases(hf), sinks=True)


def write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    activation = experts_of(config).activation
    assert isinstance(activation, ClampedSwiGLU), "gpt_oss has no other"
    return {
        **local_expert_keys(config),
        "attention_bias": config.layers[0].attention.qkv_bias,
        "sliding_window": one_window(config),
        "layer_types": layer_types_of(config),
        "swiglu_alpha": activation.alpha,
        "swiglu_limit": activation.limit,
    }


FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(
        architecture="GptOss",
        has_experts=True,
        read=read_gpt_oss,
        write=write_gpt_oss,
        modules=GPT_OSS_MODULES,
        rope=GPT_OSS_ROPE,
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": GPT_OSS_ROPE_PARAMETERS,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    )
}
