"""Phi-3, Phi-3.5, phi-4 and Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import LLAMA_MODULES, Family, Stored
from danlu.models.families.layer_keys import (
    MIXTRAL_MODULES,
    STACKED_MODULES,
    attention_biases,
    experts_of,
    local_expert_keys,
    routed_experts,
)
from danlu.models.families.mistral import read_windowed, write_windowed
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec, Router
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
PHIMOE_STACKED_MODULES: dict[str, str | Stored] = {**STACKED_MODULES, "mlp.router": "mlp.router"}
PHIMOE_ROPE = RopeRules(("longrope",), theta=1_000_000.0, aliases=(("su", "longrope"),), has_mscales=True)
PHI3_ROPE = RopeRules(("longrope",), aliases=(("su", "longrope"), ("yarn", "longrope")), rotates_part=True)


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    scaling = config.ropes[0].scaling
    written = write_windowed(config)
    if isinstance(scaling, LongRopeScaling):
        # transformers takes this family's from here, 4096 where it is silent, whatever rope_scaling says.
        written["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return written


def read_phimoe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if hf.integer("num_experts_per_tok") != 2:
        raise hf.error("num_experts_per_tok", "transformers gives a token 2 experts in this family, whatever is given")
    if (biased := hf.flag("lm_head_bias")) and hf.flag("tie_word_embeddings"):
        raise hf.error("lm_head_bias", "the bias of a head that is tied to the embedding is not supported")
    jitters = {key: hf.number(key) for key in ("router_jitter_noise", "input_jitter_noise")}
    for key, value in jitters.items():
        if not 0 <= value < 1:
            raise hf.error(key, f"{value:g} is no share: expected 0 or more, and less than 1")
    router = Router("sparse-mixer", jitter=jitters["router_jitter_noise"], input_jitter=jitters["input_jitter_noise"])
    layer = replace(
        plain,
        mixer=replace(plain.attention, **attention_biases(hf)),
        feed=routed_experts(hf, plain, router),
        norm_kind="layer-bias",
    )
    return {**read_windowed(hf, layer, layers), "head_bias": biased}


def write_phimoe(config: ModelConfig) -> dict[str, Any]:
    router = experts_of(config).router
    return {
        **write_phi3(config),
        **local_expert_keys(config),
        "attention_bias": config.layers[0].attention.qkv_bias,
        "input_jitter_noise": router.input_jitter,
        "lm_head_bias": config.head_bias,
        "router_jitter_noise": router.jitter,
    }


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
    ),
    "phimoe": Family(
        architecture="PhiMoE",
        # transformers loads by the model_type; vLLM and SGLang know PhiMoEForCausalLM alone, as it is published.
        architectures={
            "sequence-classification": "PhimoeForSequenceClassification",
            "token-classification": None,
        },
        has_experts=True,
        read=read_phimoe,
        write=write_phimoe,
        modules=MIXTRAL_MODULES,
        stacked_modules=PHIMOE_STACKED_MODULES,
        rope=PHIMOE_ROPE,
        defaults={
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "input_jitter_noise": 0.0,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "rms_norm_eps": 1e-5,
            "router_jitter_noise": 0.01,
            "sliding_window": None,
        },
    ),
}
