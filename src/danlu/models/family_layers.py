"""What only some model families have in their config.json: how their layers are read from it, and written.

Each reader takes a layer by the keys that all families have, and the number of layers; it returns fields of
ModelConfig.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.family import (
    HF_ACTIVATIONS,
    activation_of,
    layer_types_of,
    one_window,
    windows_by_type,
    windows_of,
    with_windows,
)
from danlu.models.hf_rope import RopeRules, read_ropes_by_type, write_rope, write_rope_parameters
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec
from danlu.models.rope_config import LongRopeScaling, Rope


def read_llama(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased = hf.flag("attention_bias")
    plain = replace(plain, feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    return with_windows(plain, [None] * layers, qkv_bias=biased, o_bias=biased)


def write_llama(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {"attention_bias": first.attention.qkv_bias, "mlp_bias": first.feed.bias}


def read_windowed(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if "layer_types" in hf and len(set(windows_by_type(hf, layers))) > 1:
        raise hf.error("layer_types", "this family has the same window in every layer")
    return with_windows(plain, [hf.optional_integer("sliding_window")] * layers)


def write_windowed(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.layers[0].mixer.window}


PHI3_ROPE = RopeRules(("longrope",), aliases=(("su", "longrope"), ("yarn", "longrope")))


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    scaling = config.ropes[0].scaling
    written = write_windowed(config)
    if isinstance(scaling, LongRopeScaling):
        # transformers takes this family's from here, 4096 where it is silent, whatever rope_scaling says.
        written["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return written


def read_qwen2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    return with_windows(plain, read_qwen_windows(hf, layers), qkv_bias=True)


def read_qwen_windows(hf: HFValues, layers: int) -> tuple[int | None, ...]:
    if not hf.flag("use_sliding_window"):
        return (None,) * layers
    if "layer_types" in hf:
        return windows_by_type(hf, layers)
    window, first = hf.optional_integer("sliding_window"), hf.integer("max_window_layers")
    return tuple(window if layer >= first else None for layer in range(layers))


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": one_window(config) is not None,
        "sliding_window": one_window(config),
        "max_window_layers": windows_of(config).count(None),
        "layer_types": layer_types_of(config),
    }


def read_qwen3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased = hf.flag("attention_bias")
    return with_windows(plain, read_qwen_windows(hf, layers), qkv_bias=biased, o_bias=biased, qk_norm=True)


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].attention.qkv_bias, **write_qwen2(config)}


def read_gemma2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased, window = hf.flag("attention_bias"), hf.optional_integer("sliding_window")
    alternating = [window if layer % 2 == 0 else None for layer in range(layers)]
    feed = replace(plain.feed, activation=activation_of(hf, "hidden_activation"))
    return {
        **with_windows(
            replace(plain, feed=feed, norms="sandwich"),
            windows_by_type(hf, layers) if "layer_types" in hf else alternating,
            qkv_bias=biased,
            o_bias=biased,
            softcap=hf.optional_number("attn_logit_softcapping"),
            scale=_gemma_scale(hf),
        ),
        "embedding_multiplier": hf.integer("hidden_size") ** 0.5,
        "final_softcap": hf.optional_number("final_logit_softcapping"),
        "norm_offset": 1.0,
    }


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {
        "attention_bias": first.attention.qkv_bias,
        "hidden_activation": HF_ACTIVATIONS[first.feed.activation],
        "sliding_window": one_window(config),
        "layer_types": layer_types_of(config),
        "attn_logit_softcapping": first.attention.softcap,
        "final_logit_softcapping": config.final_softcap,
        "query_pre_attn_scalar": _query_pre_attn_scalar(config),
    }


def _gemma_scale(hf: HFValues) -> float:
    scalar = hf.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise hf.error("query_pre_attn_scalar", f"{scalar:g} has no root that scores could be divided by")
    return 1 / math.sqrt(scalar)


def _query_pre_attn_scalar(config: ModelConfig) -> float:
    """Of whose root attention's scale is one over; transformers 5 wants an integer where it is one."""
    scalar = round(config.layers[0].attention.attention_scale ** -2, 9)
    return int(scalar) if scalar == int(scalar) else scalar


GEMMA3_ROPE = RopeRules(("linear", "dynamic", "llama3", "yarn"), theta=1_000_000.0)
_GEMMA3_LOCAL_THETA = ("rope_local_base_freq", 10_000.0)


def read_gemma3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if hf.optional_number("attn_logit_softcapping") is not None:
        raise hf.error("attn_logit_softcapping", "transformers reads it for this family and does not apply it")
    biased, window = hf.flag("attention_bias"), hf.optional_integer("sliding_window")
    every = hf.integer("sliding_window_pattern")
    if every < 1:
        raise hf.error("sliding_window_pattern", f"{every} is no number of layers")
    repeated = [window if (layer + 1) % every else None for layer in range(layers)]
    ropes = read_ropes_by_type(hf, plain.attention.head_dim, GEMMA3_ROPE, local_theta=_GEMMA3_LOCAL_THETA)
    feed = replace(plain.feed, activation=activation_of(hf, "hidden_activation"))
    return {
        "layers": _with_ropes(
            replace(plain, feed=feed, norms="sandwich"),
            windows_by_type(hf, layers) if "layer_types" in hf else repeated,
            ropes,
            qkv_bias=biased,
            o_bias=biased,
            qk_norm="head",
            scale=_gemma_scale(hf),
        ),
        "embedding_multiplier": hf.integer("hidden_size") ** 0.5,
        "final_softcap": hf.optional_number("final_logit_softcapping"),
        "norm_offset": 1.0,
    }


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    first, (full, sliding) = config.layers[0], _ropes_by_type(config)
    local_key, local_theta = _GEMMA3_LOCAL_THETA
    written = {} if full is None else write_rope(full, first.attention.head_dim)
    return {
        **written,
        local_key: local_theta if sliding is None else sliding.theta,
        "attention_bias": first.attention.qkv_bias,
        "hidden_activation": HF_ACTIVATIONS[first.feed.activation],
        "sliding_window": one_window(config),
        "layer_types": layer_types_of(config),
        "final_logit_softcapping": config.final_softcap,
        "query_pre_attn_scalar": _query_pre_attn_scalar(config),
    }


def _with_ropes(
    plain: LayerSpec, windows: Sequence[int | None], ropes: dict[str, Rope], **mixer: Any
) -> tuple[LayerSpec, ...]:
    """Layers whose rotary embedding goes by whether they have a window. ropes: of `read_ropes_by_type`."""
    kinds = {windowed: ropes["sliding_attention" if windowed else "full_attention"] for windowed in (False, True)}
    return tuple(
        replace(plain, mixer=replace(plain.attention, window=window, rope=kinds[window is not None], **mixer))
        for window in windows
    )


def _ropes_by_type(config: ModelConfig) -> tuple[Rope | None, Rope | None]:
    """The rotary embeddings of layers that see everything, and of those with a window; None where there are none."""
    of_type = {layer.mixer.window is not None: layer.mixer.rope for layer in config.layers}
    return of_type.get(False), of_type.get(True)


def read_olmo2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased = hf.flag("attention_bias")
    plain = replace(plain, norms="post")
    return with_windows(plain, [None] * layers, qkv_bias=biased, o_bias=biased, qk_norm="full")


def write_olmo2(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].attention.qkv_bias}


OLMO3_ROPE = RopeRules(("linear", "dynamic", "llama3", "yarn"), theta=500_000.0)


def read_olmo3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased, window = hf.flag("attention_bias"), hf.optional_integer("sliding_window")
    if "rope_theta" in hf and hf.number("rope_theta") != OLMO3_ROPE.theta:
        # transformers 4 turns all layers by it, transformers 5 only those without a window.
        raise hf.error("rope_theta", "is ambiguous for this family; say it for each type of layer in rope_parameters")
    ropes = read_ropes_by_type(hf, plain.attention.head_dim, OLMO3_ROPE, local_theta=("rope_theta", OLMO3_ROPE.theta))
    repeated = [window if (layer + 1) % 4 else None for layer in range(layers)]
    windows = windows_by_type(hf, layers) if "layer_types" in hf else repeated
    plain = replace(plain, norms="post")
    return {"layers": _with_ropes(plain, windows, ropes, qkv_bias=biased, o_bias=biased, qk_norm="full")}


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    full, sliding = _ropes_by_type(config)
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


SMOLLM3_ROPE = RopeRules(theta=2_000_000.0)


def read_smollm3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    rotated = hf.raw("no_rope_layers")  # where 1 is of a layer that is rotated
    if rotated is None:
        every = hf.integer("no_rope_layer_interval")
        if every < 1:
            raise hf.error("no_rope_layer_interval", f"{every} is no number of layers")
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(flag not in (0, 1) for flag in rotated):
        raise hf.error("no_rope_layers", f"expected a 0 or 1 for each of {layers} layers, found {rotated!r}")
    window = hf.optional_integer("sliding_window") if hf.flag("use_sliding_window") else None
    windows: Sequence[int | None] = [None if turned else window for turned in rotated[:layers]]
    if window is not None and "layer_types" in hf:
        windows = windows_by_type(hf, layers)
    biased = hf.flag("attention_bias")
    plain = replace(plain, feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    all_rotated: tuple[LayerSpec, ...] = with_windows(plain, windows, qkv_bias=biased, o_bias=biased)["layers"]
    return {
        "layers": tuple(
            layer if turned else replace(layer, mixer=replace(layer.attention, rope=None))
            for layer, turned in zip(all_rotated, rotated, strict=False)
        )
    }


def write_smollm3(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama(config),
        "no_rope_layers": [int(layer.mixer.rope is not None) for layer in config.layers],
        "use_sliding_window": one_window(config) is not None,
        "sliding_window": one_window(config),
        "layer_types": layer_types_of(config),
    }


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
"""What transformers takes where a config has no rotary settings."""


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


def read_granite(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    divisor = hf.number("logits_scaling")
    if divisor == 0:
        raise hf.error("logits_scaling", "logits cannot be divided by 0")
    llama = read_llama(hf, plain, layers)["layers"]
    scale = hf.number("attention_multiplier")
    return {
        "layers": tuple(replace(layer, mixer=replace(layer.attention, scale=scale)) for layer in llama),
        "embedding_multiplier": hf.number("embedding_multiplier"),
        "residual_multiplier": hf.number("residual_multiplier"),
        "logits_divisor": divisor,
    }


def write_granite(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama(config),
        "attention_multiplier": config.layers[0].attention.attention_scale,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }
