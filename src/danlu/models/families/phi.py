"""Phi-3, Phi-3.5 and phi-4."""

from __future__ import annotations

from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import LLAMA_MODULES, Family
from danlu.models.families.mistral import read_windowed, write_windowed
from danlu.models.hf_rope import RopeRules
from danlu.models.rope_config import LongRopeScaling

PHI3_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    # Modules that share a name on disk lie there one under the other, in the order of the forward pass.
    "attention.q_proj": "self_attn.qkv_proj",
    "attention.k_proj": "self_attn.qkv_proj",
    "attention.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
PHI3_ROPE = RopeRules(("longrope",), aliases=(("su", "longrope"), ("yarn", "longrope")), rotates_part=True)


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    scaling = config.ropes[0].scaling
    written = write_windowed(config)
    if isinstance(scaling, LongRopeScaling):
        # transformers takes this family's from here, 4096 where it is silent, whatever rope_scaling says.
        written["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return written


FAMILIES: dict[str, Family] = {
    "phi3": Family(
        architecture="Phi3",
        read=read_windowed,
        write=write_phi3,
        modules=PHI3_MODULES,
        rope=PHI3_ROPE,
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "max_position_embeddings": 4096,
            "num_key_value_heads": None,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32000,
            "rms_norm_eps": 1e-5,
        },
    )
}
