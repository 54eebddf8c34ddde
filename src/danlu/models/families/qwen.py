"""Qwen2, Qwen2.5 and Qwen3."""

from __future__ import annotations

from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.families.layer_keys import (
    attention_biases,
    layer_types_of,
    one_window,
    windows_by_type,
    windows_of,
    with_windows,
)
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec


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
    return with_windows(plain, read_qwen_windows(hf, layers), **attention_biases(hf), qk_norm="head")


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].attention.qkv_bias, **write_qwen2(config)}


FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        architecture="Qwen2",
        read=read_qwen2,
        write=write_qwen2,
        defaults={"max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096},
    ),
    "qwen3": Family(
        architecture="Qwen3",
        read=read_qwen3,
        write=write_qwen3,
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "sliding_window": 4096,
        },
    ),
}
