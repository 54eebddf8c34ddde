"""Qwen2, Qwen2.5 and Qwen3, dense and with experts, and the keys of experts that later models of Qwen share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.families.layer_keys import (
    QWEN_MOE_MODULES,
    STACKED_MODULES,
    attention_biases,
    dense_width,
    experts_of,
    interval_of,
    layer_types_of,
    num_experts,
    one_window,
    windows_by_type,
    windows_of,
    with_feeds,
    with_windows,
)
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Dense, Experts, LayerSpec, Router


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


def read_qwen2_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    windows = _qwen2_moe_windows(hf, layers)
    plain_layers = with_windows(plain, windows, qkv_bias=hf.flag("qkv_bias"))["layers"]
    return {"layers": with_feeds(plain_layers, sparse_layers(hf, plain, gated_shared_experts(hf, plain), layers))}


def gated_shared_experts(hf: HFValues, plain: LayerSpec) -> Experts:
    """Reads the experts of Qwen's later models: besides the router's, one that all tokens go through, with a gate."""
    return replace(
        qwen_experts(hf, plain),
        shared=Dense(hf.integer("shared_expert_intermediate_size"), plain.feed.activation),
        shared_gate=True,
    )


def gated_shared_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of `gated_shared_experts`, and of which layers have them."""
    experts = experts_of(config)
    return {
        **qwen_keys(config),
        "num_experts": experts.num_experts,
        "shared_expert_intermediate_size": None if experts.shared is None else experts.shared.intermediate_size,
    }


def _qwen2_moe_windows(hf: HFValues, layers: int) -> tuple[int | None, ...]:
    """Not as in qwen2: every other layer below `max_window_layers` has the window."""
    if not hf.flag("use_sliding_window") or "layer_types" in hf:
        return read_qwen_windows(hf, layers)
    window, end = hf.optional_integer("sliding_window"), hf.integer("max_window_layers")
    return tuple(window if layer % 2 == 0 and layer < end else None for layer in range(layers))


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {**write_qwen2(config), **gated_shared_keys(config), "qkv_bias": config.layers[0].attention.qkv_bias}


def read_qwen3_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    window = hf.optional_integer("sliding_window") if hf.flag("use_sliding_window") else None
    plain_layers = with_windows(plain, [window] * layers, **attention_biases(hf), qk_norm="head")["layers"]
    return {"layers": with_feeds(plain_layers, sparse_layers(hf, plain, qwen_experts(hf, plain), layers))}


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0].attention
    return {
        **qwen_keys(config),
        "num_experts": experts_of(config).num_experts,
        "attention_bias": first.qkv_bias,
        "use_sliding_window": first.window is not None,
        "sliding_window": first.window,
    }


def qwen_experts(hf: HFValues, plain: LayerSpec) -> Experts:
    return Experts(
        num_experts=num_experts(hf),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=hf.integer("moe_intermediate_size"),
        activation=plain.feed.activation,
        router=Router(normalise=hf.flag("norm_topk_prob")),
    )


def sparse_layers(hf: HFValues, plain: LayerSpec, experts: Experts, layers: int) -> list[Dense | Experts]:
    """The feed-forward network of each layer: of each `decoder_sparse_step`-th experts, but for `mlp_only_layers`."""
    step, dense = interval_of(hf, "decoder_sparse_step"), hf.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(layer not in range(layers) for layer in dense):
        raise hf.error("mlp_only_layers", f"expected numbers of the {layers} layers, found {dense!r}")
    assert isinstance(plain.feed, Dense)
    own = plain.feed
    feeds = [own if layer in dense or (layer + 1) % step else experts for layer in range(layers)]
    if experts not in feeds:
        raise hf.error("decoder_sparse_step", f"{step} leaves none of {layers} layers with experts: use a dense family")
    return feeds


def qwen_keys(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "intermediate_size": dense_width(config),
        "norm_topk_prob": experts.router.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number, layer in enumerate(config.layers) if isinstance(layer.feed, Dense)],
    }


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
        defaults={"head_dim": 128, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2Moe",
        has_experts=True,
        read=read_qwen2_moe,
        write=write_qwen2_moe,
        modules=QWEN_MOE_MODULES,
        stacked_modules=STACKED_MODULES,
        defaults={
            "decoder_sparse_step": 1,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 4096,
        },
    ),
    "qwen3_moe": Family(
        architecture="Qwen3Moe",
        has_experts=True,
        read=read_qwen3_moe,
        write=write_qwen3_moe,
        modules=QWEN_MOE_MODULES,
        stacked_modules=STACKED_MODULES,
        defaults={
            "decoder_sparse_step": 1,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
        },
    ),
}
