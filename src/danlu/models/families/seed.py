"""Seed-OSS: Llama with biases of queries, keys and values, and one of the output that has a key of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.families.layer_keys import with_windows
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec


def read_seed_oss(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    plain = replace(plain, feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    biases = {"qkv_bias": hf.flag("attention_bias"), "o_bias": hf.flag("attention_out_bias")}
    return with_windows(plain, [None] * layers, **biases)


def write_seed_oss(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {
        "attention_bias": first.attention.qkv_bias,
        "attention_out_bias": first.attention.o_bias,
        "mlp_bias": first.feed.bias,
        "residual_dropout": 0.0,
    }


FAMILIES: dict[str, Family] = {
    "seed_oss": Family(
        architecture="SeedOss",
        read=read_seed_oss,
        write=write_seed_oss,
        defaults={
            "attention_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "pad_token_id": 1,
        },
    ),
}
