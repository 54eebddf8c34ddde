"""MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family
from danlu.models.families.layer_keys import (
    MIXTRAL_MODULES,
    MIXTRAL_STACKED_MODULES,
    local_expert_keys,
    routed_experts,
    with_windows,
)
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec, Router

MINIMAX_ROPE = RopeRules(theta=5_000_000.0, rotates_part=True, dim_key="rotary_dim")


def read_minimax_m2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    router = Router("sigmoid", normalise=True, bias_correction=True)
    plain = replace(plain, feed=routed_experts(hf, plain, router))
    return with_windows(plain, [None] * layers, qk_norm="full")


def write_minimax_m2(config: ModelConfig) -> dict[str, Any]:
    rope = config.layers[0].attention.rope
    # In addition to the share of a head that transformers reads: vLLM and the published code read this key alone.
    return {**local_expert_keys(config), "rotary_dim": None if rope is None else rope.dim}


FAMILIES: dict[str, Family] = {
    "minimax_m2": Family(
        architecture="MiniMaxM2",
        architectures=GENERATION_ONLY,
        has_experts=True,
        read=read_minimax_m2,
        write=write_minimax_m2,
        modules=MIXTRAL_MODULES,
        stacked_modules=MIXTRAL_STACKED_MODULES,
        rope=MINIMAX_ROPE,
        defaults={
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_experts_per_tok": 8,
        },
    )
}
