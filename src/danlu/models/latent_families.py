"""Families of latent and of factorized attention: how their layers are read from a config.json, and written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.factorized_spec import Factorized
from danlu.models.family import Stored
from danlu.models.family_experts import (
    DEEPSEEK_MOE_MODULES,
    deepseek_feeds,
    deepseek_keys,
    deepseek_v2_router,
    deepseek_v3_router,
    with_feeds,
)
from danlu.models.hf_rope import RopeRules, read_rope
from danlu.models.hf_values import HFValues
from danlu.models.latent_spec import Latent
from danlu.models.layer_spec import Dense, Experts, LayerSpec

DEEPSEEK_MODULES: dict[str, str | Stored] = {
    **DEEPSEEK_MOE_MODULES,
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
}
# No frequencies that follow a document's length: the rotated keys of a cache would be those of another length.
DEEPSEEK_ROPE = RopeRules(scalings=("linear", "llama3", "yarn"))


def read_deepseek_v2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    has_experts = hf.integer("first_k_dense_replace") < layers
    if has_experts and hf.flag("mlp_bias"):
        raise hf.error("mlp_bias", "experts with biases are not supported for this family")
    assert isinstance(plain.feed, Dense)
    plain = replace(plain, mixer=_latent(hf, interleaved=True), feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    if not has_experts:
        return {"layers": (plain,) * layers}
    return {"layers": with_feeds([plain] * layers, deepseek_feeds(hf, plain, deepseek_v2_router(hf), layers))}


def write_deepseek_v2(config: ModelConfig) -> dict[str, Any]:
    feed = config.layers[-1].feed
    groups = feed.router.groups if isinstance(feed, Experts) else 1
    return {
        **_write_latent(config),
        "mlp_bias": isinstance(feed, Dense) and feed.bias,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }


def read_deepseek_v3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    plain = replace(plain, mixer=_latent(hf, interleaved=hf.flag("rope_interleave")))
    if hf.integer("first_k_dense_replace") >= layers:
        return {"layers": (plain,) * layers}
    return {"layers": with_feeds([plain] * layers, deepseek_feeds(hf, plain, deepseek_v3_router(hf), layers))}


def write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    mixer = config.layers[0].mixer
    return {**_write_latent(config), "rope_interleave": isinstance(mixer, Latent) and mixer.interleaved}


def _latent(hf: HFValues, *, interleaved: bool) -> Latent:
    return Latent(
        heads=hf.integer("num_attention_heads"),
        kv_lora_rank=hf.integer("kv_lora_rank"),
        qk_nope_head_dim=hf.integer("qk_nope_head_dim"),
        v_head_dim=hf.integer("v_head_dim"),
        rope=read_rope(hf, hf.integer("qk_rope_head_dim"), DEEPSEEK_ROPE),
        q_lora_rank=hf.optional_integer("q_lora_rank"),
        bias=hf.flag("attention_bias"),
        interleaved=interleaved,
    )


def _write_latent(config: ModelConfig) -> dict[str, Any]:
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Latent), "the family has latent attention"
    return {
        **deepseek_keys(config),
        "attention_bias": mixer.bias,
        "kv_lora_rank": mixer.kv_lora_rank,
        "q_lora_rank": mixer.q_lora_rank,
        "qk_nope_head_dim": mixer.qk_nope_head_dim,
        "qk_rope_head_dim": mixer.qk_rope_head_dim,
        "v_head_dim": mixer.v_head_dim,
    }


def read_mfa(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    head_dim = hf.integer("head_dim")
    mixer = Factorized(
        heads=hf.integer("num_attention_heads"),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, RopeRules()),
        query_rank=hf.integer("query_rank") if "query_rank" in hf else head_dim,
        key_reuse=hf.flag("key_reuse"),
        query_norm=hf.flag("query_norm"),
    )
    return {"layers": (replace(plain, mixer=mixer),) * layers}


def write_mfa(config: ModelConfig) -> dict[str, Any]:
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Factorized), "the family has factorized attention"
    return {"query_rank": mixer.query_rank, "key_reuse": mixer.key_reuse, "query_norm": mixer.query_norm}
