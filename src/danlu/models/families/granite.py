"""Granite: Llama with multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family
from danlu.models.families.llama import read_llama, write_llama
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec


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


FAMILIES: dict[str, Family] = {
    "granite": Family(
        architecture="Granite",
        architectures=GENERATION_ONLY,
        read=read_granite,
        write=write_granite,
        defaults={
            "attention_multiplier": 1.0,
            "bos_token_id": 1,
            "embedding_multiplier": 1.0,
            "eos_token_id": 2,
            "logits_scaling": 1.0,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "residual_multiplier": 1.0,
        },
    ),
}
