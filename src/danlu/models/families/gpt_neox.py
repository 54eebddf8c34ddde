"""GPT-NeoX (Pythia, Dolly, RedPajama): LayerNorms and products with biases, a network without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family, Stored
from danlu.models.families.layer_keys import attention_biases
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Dense, LayerSpec

_FUSED = Stored("attention.query_key_value", turns=lambda layer: layer.attention.heads)
"""The query, key and value of each head, one under the other, then those of the next head."""
GPT_NEOX_MODULES: dict[str, str | Stored] = {
    "attention.q_proj": _FUSED,
    "attention.k_proj": _FUSED,
    "attention.v_proj": _FUSED,
    "attention.o_proj": "attention.dense",
    "attention_norm": "input_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "mlp_norm": "post_attention_layernorm",
}


def read_gpt_neox(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    mixer = plain.attention
    if mixer.kv_heads != mixer.heads:
        raise hf.error("num_key_value_heads", "transformers does not read it for this family: each head has its own")
    assert isinstance(plain.feed, Dense)
    layer = replace(
        plain,
        mixer=replace(mixer, **attention_biases(hf)),
        feed=replace(plain.feed, bias=True, gated=False),
        norm_kind="layer-bias",
        parallel=hf.flag("use_parallel_residual"),
    )
    return {"layers": (layer,) * layers}


def write_gpt_neox(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    rope = first.mixer.rope
    assert rope is not None, "the family rotates every layer"
    return {
        "attention_bias": first.attention.qkv_bias,
        "num_key_value_heads": None,
        "partial_rotary_factor": None,
        "rope_theta": None,
        "rotary_emb_base": rope.theta,
        "rotary_pct": rope.dim / first.attention.head_dim,
        "use_parallel_residual": first.parallel,
    }


FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(
        architecture="GPTNeoX",
        aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        architectures={"token-classification": None},  # its head there is called classifier
        read=read_gpt_neox,
        write=write_gpt_neox,
        modules=GPT_NEOX_MODULES,
        prefix="gpt_neox",
        outer_modules={"embed_tokens": "embed_in", "norm": "final_layer_norm", "lm_head": "embed_out"},
        norm_eps_key="layer_norm_eps",
        heads_split_width=True,
        rope=RopeRules(rotates_part=True),
        defaults={
            "attention_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
    ),
}
