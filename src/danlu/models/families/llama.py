"""Llama 2 and 3, and models built like them: TinyLlama, SmolLM2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.families.layer_keys import attention_biases, with_windows
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec


def read_llama(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    plain = replace(plain, feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    return with_windows(plain, [None] * layers, **attention_biases(hf))


def write_llama(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {"attention_bias": first.attention.qkv_bias, "mlp_bias": first.feed.bias}


FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="Llama",
        read=read_llama,
        write=write_llama,
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
        },
    ),
}
