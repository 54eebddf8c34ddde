"""Gemma, Gemma 2, and Gemma 3's language part."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import LLAMA_MODULES, Family
from danlu.models.families.layer_keys import (
    HF_ACTIVATIONS,
    activation_of,
    alternating_windows,
    attention_biases,
    interval_of,
    layer_types_of,
    one_window,
    ropes_by_type,
    windows_by_type,
    with_ropes,
    with_windows,
)
from danlu.models.hf_rope import RopeRules, read_ropes_by_type, write_rope
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec

GEMMA_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
GEMMA3_ROPE = RopeRules(("linear", "dynamic", "llama3", "yarn"), theta=1_000_000.0)
_GEMMA3_LOCAL_THETA = ("rope_local_base_freq", 10_000.0)


def read_gemma(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    read = with_windows(plain, [None] * layers, **attention_biases(hf))
    return {**read, **_read_model_keys(hf)}


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].attention.qkv_bias}


def read_gemma2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    layer, softcap = _gemma_layer(hf, plain), hf.optional_number("attn_logit_softcapping")
    return {**with_windows(layer, alternating_windows(hf, layers), softcap=softcap), **_read_model_keys(hf)}


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    return {**_gemma_keys(config), "attn_logit_softcapping": config.layers[0].attention.softcap}


def read_gemma3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if hf.optional_number("attn_logit_softcapping") is not None:
        raise hf.error("attn_logit_softcapping", "transformers reads it for this family and does not apply it")
    every, window = interval_of(hf, "sliding_window_pattern"), hf.optional_integer("sliding_window")
    windows = windows_by_type(hf, layers, absent=[window if (layer + 1) % every else None for layer in range(layers)])
    ropes = read_ropes_by_type(hf, plain.attention.head_dim, GEMMA3_ROPE, local_theta=_GEMMA3_LOCAL_THETA)
    return {"layers": with_ropes(_gemma_layer(hf, plain), windows, ropes, qk_norm="head"), **_read_model_keys(hf)}


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    full, sliding = ropes_by_type(config)
    local_key, local_theta = _GEMMA3_LOCAL_THETA
    written = {} if full is None else write_rope(full, config.layers[0].attention.head_dim)
    return {**written, local_key: local_theta if sliding is None else sliding.theta, **_gemma_keys(config)}


def _gemma_layer(hf: HFValues, plain: LayerSpec) -> LayerSpec:
    """The layer that both share, without its window and its rotation."""
    scalar = hf.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise hf.error("query_pre_attn_scalar", f"{scalar:g} has no root that scores could be divided by")
    return replace(
        plain,
        mixer=replace(plain.attention, scale=1 / math.sqrt(scalar), **attention_biases(hf)),
        feed=replace(plain.feed, activation=activation_of(hf, "hidden_activation")),
        norms="sandwich",
    )


def _read_model_keys(hf: HFValues) -> dict[str, Any]:
    """Returns fields of ModelConfig that belong to no layer."""
    return {
        "embedding_multiplier": hf.integer("hidden_size") ** 0.5,
        "final_softcap": hf.optional_number("final_logit_softcapping"),
        "norm_offset": 1.0,
    }


def _gemma_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys that both families have."""
    first = config.layers[0]
    return {
        "attention_bias": first.attention.qkv_bias,
        "hidden_activation": HF_ACTIVATIONS[first.feed.activation],
        "sliding_window": one_window(config),
        "layer_types": layer_types_of(config),
        "final_logit_softcapping": config.final_softcap,
        "query_pre_attn_scalar": _query_pre_attn_scalar(first.attention.attention_scale),
    }


def _query_pre_attn_scalar(scale: float) -> float:
    """`query_pre_attn_scalar`: attention is scaled by its inverse square root; transformers 5 wants an integer where it
    is one.
    """
    scalar = round(scale**-2, 9)
    return int(scalar) if scalar == int(scalar) else scalar


FAMILIES: dict[str, Family] = {
    "gemma": Family(
        architecture="Gemma",
        read=read_gemma,
        write=write_gemma,
        # Published files say gelu and mean its approximation, with which the models were trained; so does transformers.
        activations={"gelu": "gelu_tanh"},
        defaults={
            "bos_token_id": 2,
            "eos_token_id": 1,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": Family(
        architecture="Gemma2",
        read=read_gemma2,
        write=write_gemma2,
        modules=GEMMA_MODULES,
        defaults={
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": Family(
        architecture="Gemma3",
        architectures={"sequence-classification": "Gemma3TextForSequenceClassification", "token-classification": None},
        read=read_gemma3,
        write=write_gemma3,
        modules=GEMMA_MODULES,
        rope=GEMMA3_ROPE,
        ropes_differ=True,
        defaults={
            "bos_token_id": 2,
            "eos_token_id": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
}
