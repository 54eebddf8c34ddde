"""Mistral, Ministral 3 and Mixtral."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.families.layer_keys import (
    MIXTRAL_MODULES,
    MIXTRAL_STACKED_MODULES,
    local_expert_keys,
    routed_experts,
    windows_by_type,
    with_windows,
)
from danlu.models.hf_rope import RopeRules, write_rope_parameters
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec, Router

MINISTRAL3_ROPE = RopeRules(("linear", "dynamic", "llama3", "yarn"), has_temperature=True)
MINISTRAL3_PARAMETERS: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""transformers' values where a config has no rotary settings."""
MIXTRAL_ROPE = RopeRules(theta=1_000_000.0)


def read_windowed(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if "layer_types" in hf and len(set(windows_by_type(hf, layers))) > 1:
        raise hf.error("layer_types", "this family has the same window in every layer")
    return with_windows(plain, [hf.optional_integer("sliding_window")] * layers)


def write_windowed(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.layers[0].mixer.window}


def read_ministral3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if plain.mixer.rope is None or plain.mixer.rope.temperature is None:
        raise hf.error(
            "rope_parameters",
            "llama_4_scaling_beta and original_max_position_embeddings are missing, without which transformers does "
            "not compute this family",
        )
    return read_windowed(hf, plain, layers)


def write_ministral3(config: ModelConfig) -> dict[str, Any]:
    mixer = config.layers[0].attention
    written = {} if mixer.rope is None else write_rope_parameters(mixer.rope, mixer.head_dim)
    return {"rope_theta": None, "rope_scaling": None, "rope_parameters": written, **write_windowed(config)}


def read_mixtral(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    return read_windowed(hf, replace(plain, feed=routed_experts(hf, plain, Router(normalise=True))), layers)


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {**write_windowed(config), **local_expert_keys(config)}


FAMILIES: dict[str, Family] = {
    "ministral3": Family(
        architecture="Ministral3",
        read=read_ministral3,
        write=write_ministral3,
        rope=MINISTRAL3_ROPE,
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "pad_token_id": 11,
            "rms_norm_eps": 1e-5,
            "rope_parameters": MINISTRAL3_PARAMETERS,
            "sliding_window": None,
        },
    ),
    "mistral": Family(
        architecture="Mistral",
        read=read_windowed,
        write=write_windowed,
        defaults={"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "mixtral": Family(
        architecture="Mixtral",
        has_experts=True,
        read=read_mixtral,
        write=write_mixtral,
        modules=MIXTRAL_MODULES,
        stacked_modules=MIXTRAL_STACKED_MODULES,
        rope=MIXTRAL_ROPE,
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
}
