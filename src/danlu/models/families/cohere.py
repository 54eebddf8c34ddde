"""Cohere 2 (Command R7B, Command A): a parallel residual behind one LayerNorm, rotation in the layers with a window."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family
from danlu.models.families.layer_keys import (
    attention_biases,
    interval_of,
    layer_types_of,
    one_window,
    windows_by_type,
)
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec

COHERE_MODULES: dict[str, str] = {
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp": "mlp",
}
_AS_BUILT: dict[str, Any] = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "use_qk_norm": False,
}
"""Keys of published files that transformers does not read -> the values of the model that it builds."""


def read_cohere2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    for key, built in _AS_BUILT.items():
        if key in hf and hf.raw(key) != built:
            raise hf.error(key, f"{hf.raw(key)!r} is not supported: transformers builds the model with {built!r}")
    scale = hf.number("logit_scale")
    if scale <= 0:
        raise hf.error("logit_scale", f"logits cannot be multiplied by {scale:g}")
    every, window = interval_of(hf, "sliding_window_pattern"), hf.optional_integer("sliding_window")
    windows = windows_by_type(hf, layers, absent=[window if (layer + 1) % every else None for layer in range(layers)])
    plain = replace(plain, norms="shared", norm_kind="layer", parallel=True)
    mixer = replace(plain.attention, interleaved=True, **attention_biases(hf))
    unrotated = replace(mixer, rope=None)
    mixers = [unrotated if each is None else replace(mixer, window=each) for each in windows]
    return {"layers": tuple(replace(plain, mixer=each) for each in mixers), "logits_divisor": 1 / scale}


def write_cohere2(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.layers[0].attention.qkv_bias,
        "layer_types": layer_types_of(config),
        "logit_scale": _inverse(config.logits_divisor),
        "sliding_window": one_window(config),
    }


def _inverse(divisor: float) -> float:
    """The scale of which `divisor` is one over it: rounded twice, one over the divisor may be its neighbour."""
    scale = 1 / divisor
    nearby = (scale, math.nextafter(scale, 0.0), math.nextafter(scale, math.inf))
    return next((each for each in nearby if 1 / each == divisor), scale)


FAMILIES: dict[str, Family] = {
    "cohere2": Family(
        architecture="Cohere2",
        architectures=GENERATION_ONLY,
        read=read_cohere2,
        write=write_cohere2,
        modules=COHERE_MODULES,
        norm_eps_key="layer_norm_eps",
        heads_split_width=True,
        defaults={
            "bos_token_id": 5,
            "eos_token_id": 255001,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "num_key_value_heads": None,
            "pad_token_id": 0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
    ),
}
