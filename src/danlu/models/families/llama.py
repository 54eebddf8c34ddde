"""Llama 2 and 3, models built like them (TinyLlama, SmolLM2), and those that are Llama with little more.

SmolLM3 has some layers that are not rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.families.layer_keys import (
    attention_biases,
    interval_of,
    layer_types_of,
    one_window,
    windows_by_type,
    with_windows,
)
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec


def read_llama(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    plain = replace(plain, feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    return with_windows(plain, [None] * layers, **attention_biases(hf))


def write_llama(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {"attention_bias": first.attention.qkv_bias, "mlp_bias": first.feed.bias}


SMOLLM3_ROPE = RopeRules(theta=2_000_000.0)


def read_smollm3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    rotated = hf.raw("no_rope_layers")  # where 1 is of a layer that is rotated
    if rotated is None:
        every = interval_of(hf, "no_rope_layer_interval")
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(flag not in (0, 1) for flag in rotated):
        raise hf.error("no_rope_layers", f"expected a 0 or 1 for each of {layers} layers, found {rotated!r}")
    window = hf.optional_integer("sliding_window") if hf.flag("use_sliding_window") else None
    windows: Sequence[int | None] = [None if turned else window for turned in rotated[:layers]]
    if window is not None and "layer_types" in hf:
        windows = windows_by_type(hf, layers)
    plain = replace(plain, feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    all_rotated: tuple[LayerSpec, ...] = with_windows(plain, windows, **attention_biases(hf))["layers"]
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


FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="Llama",
        read=read_llama,
        write=write_llama,
        defaults={"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048, "num_key_value_heads": None},
    ),
    "smollm3": Family(
        architecture="SmolLM3",
        read=read_smollm3,
        write=write_smollm3,
        rope=SMOLLM3_ROPE,
        defaults={
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "pad_token_id": 128004,
            "tie_word_embeddings": True,
        },
    ),
}
