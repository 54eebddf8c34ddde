"""Hunyuan's dense models: queries and keys are normed behind their rotation."""

from __future__ import annotations

from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import LLAMA_MODULES, Family
from danlu.models.families.layer_keys import attention_biases, with_windows
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec

HUNYUAN_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    "attention.q_norm": "self_attn.query_layernorm",
    "attention.k_norm": "self_attn.key_layernorm",
}


def read_hunyuan(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if hf.flag("use_cla"):
        raise hf.error("use_cla", "keys and values that layers share are not supported")
    if hf.raw("use_qk_norm") is False:
        raise hf.error("use_qk_norm", "transformers norms queries and keys of this family all the same")
    return with_windows(plain, [None] * layers, **attention_biases(hf), qk_norm="head", norm_behind_rope=True)


def write_hunyuan(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].attention.qkv_bias}


FAMILIES: dict[str, Family] = {
    "hunyuan_v1_dense": Family(
        architecture="HunYuanDenseV1",
        architectures={"token-classification": None},
        read=read_hunyuan,
        write=write_hunyuan,
        modules=HUNYUAN_MODULES,
        rope=RopeRules(has_alpha=True),
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-5,
        },
    ),
}
