"""ERNIE 4.5, its dense models: Llama with neighbouring features of a head as rotated pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family
from danlu.models.families.layer_keys import with_windows
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec


def read_ernie4_5(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased = hf.flag("use_bias")
    plain = replace(plain, feed=replace(plain.feed, bias=biased))
    return with_windows(plain, [None] * layers, qkv_bias=biased, o_bias=biased, interleaved=True)


def write_ernie4_5(config: ModelConfig) -> dict[str, Any]:
    return {"use_bias": config.layers[0].attention.qkv_bias}


FAMILIES: dict[str, Family] = {
    "ernie4_5": Family(
        architecture="Ernie4_5",
        architectures=GENERATION_ONLY,
        read=read_ernie4_5,
        write=write_ernie4_5,
        rope=RopeRules(theta=500_000.0),
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
}
