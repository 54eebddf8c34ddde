"""DeepSeek-V2 and -V3 (and Kimi K2): latent attention, experts behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family, Stored
from danlu.models.families.layer_keys import QWEN_MOE_MODULES, STACKED_MODULES, dense_width, experts_of, with_feeds
from danlu.models.hf_rope import RopeRules, read_rope
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Dense, Experts, LayerSpec, Router
from danlu.models.mixer_spec import Latent

DEEPSEEK_MOE_MODULES: dict[str, str | Stored] = {
    **QWEN_MOE_MODULES,
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    "mlp.shared": "mlp.shared_experts",
}
DEEPSEEK_MODULES: dict[str, str | Stored] = {
    **DEEPSEEK_MOE_MODULES,
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
}
# No frequencies that follow a document's length: the rotated keys of a cache would be those of another length.
DEEPSEEK_ROPE = RopeRules(scalings=("linear", "llama3", "yarn"))


def read_deepseek_v2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    has_experts = hf.integer("first_k_dense_replace") < layers
    if has_experts and hf.flag("mlp_bias"):
        raise hf.error("mlp_bias", "experts with biases are not supported for this family")
    assert isinstance(plain.feed, Dense)
    plain = replace(plain, mixer=read_latent(hf, interleaved=True), feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    if not has_experts:
        return {"layers": (plain,) * layers}
    return {"layers": with_feeds([plain] * layers, deepseek_feeds(hf, plain, deepseek_v2_router(hf), layers))}


def write_deepseek_v2(config: ModelConfig) -> dict[str, Any]:
    feed = config.layers[-1].feed
    groups = feed.router.groups if isinstance(feed, Experts) else 1
    return {
        **write_latent(config),
        "mlp_bias": isinstance(feed, Dense) and feed.bias,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }


def read_deepseek_v3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    plain = replace(plain, mixer=read_latent(hf, interleaved=hf.flag("rope_interleave")))
    if hf.integer("first_k_dense_replace") >= layers:
        return {"layers": (plain,) * layers}
    return {"layers": with_feeds([plain] * layers, deepseek_feeds(hf, plain, deepseek_v3_router(hf), layers))}


def write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    mixer = config.layers[0].mixer
    return {**write_latent(config), "rope_interleave": isinstance(mixer, Latent) and mixer.interleaved}


def read_latent(hf: HFValues, *, interleaved: bool) -> Latent:
    return Latent(
        heads=hf.integer("num_attention_heads"),
        kv_lora_rank=hf.integer("kv_lora_rank"),
        qk_nope_head_dim=hf.integer("qk_nope_head_dim"),
        v_head_dim=hf.integer("v_head_dim"),
        rope=read_rope(hf, hf.integer("qk_rope_head_dim"), DEEPSEEK_ROPE),
        q_lora_rank=hf.optional_integer("q_lora_rank"),
        bias=hf.flag("attention_bias"),
        interleaved=interleaved,
    )


def write_latent(config: ModelConfig) -> dict[str, Any]:
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Latent), "the family has latent attention"
    return {
        **deepseek_keys(config),
        "attention_bias": mixer.bias,
        "kv_lora_rank": mixer.kv_lora_rank,
        "q_lora_rank": mixer.q_lora_rank,
        "qk_nope_head_dim": mixer.qk_nope_head_dim,
        "qk_rope_head_dim": mixer.qk_rope_head_dim,
        "v_head_dim": mixer.v_head_dim,
    }


def deepseek_v3_router(hf: HFValues) -> Router:
    return Router(
        "sigmoid",
        normalise=hf.flag("norm_topk_prob"),
        scale=hf.number("routed_scaling_factor"),
        groups=hf.integer("n_group"),
        top_groups=hf.integer("topk_group"),
        group_score="top-2",
        bias_correction=True,
    )


def deepseek_v2_router(hf: HFValues) -> Router:
    if hf.flag("norm_topk_prob"):
        raise hf.error("norm_topk_prob", "transformers reads it for this family and does not apply it")
    method = hf.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise hf.error("topk_method", f"{method!r} is not supported; supported: greedy, group_limited_greedy")
    plain = Router(scale=hf.number("routed_scaling_factor"))
    if method == "greedy":
        return plain
    return replace(plain, groups=hf.integer("n_group"), top_groups=hf.integer("topk_group"))


def deepseek_feeds(hf: HFValues, plain: LayerSpec, router: Router, layers: int) -> list[Dense | Experts]:
    """The feed-forward network of each layer: experts, and shared ones, behind the first `first_k_dense_replace`."""
    first, experts = hf.integer("first_k_dense_replace"), deepseek_experts(hf, plain, router)
    return [plain.feed if layer < first else experts for layer in range(layers)]


def deepseek_experts(hf: HFValues, plain: LayerSpec, router: Router) -> Experts:
    """The experts of a layer, routed and shared."""
    width, shared = hf.integer("moe_intermediate_size"), hf.optional_integer("n_shared_experts") or 0
    activation = plain.feed.activation
    return Experts(
        num_experts=hf.integer("n_routed_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=width,
        activation=activation,
        router=router,
        shared=Dense(shared * width, activation) if shared else None,
    )


def deepseek_keys(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of `deepseek_feeds` and its routers; without experts, the keys for a model without them."""
    feeds = [layer.feed for layer in config.layers]
    first = next((number for number, feed in enumerate(feeds) if isinstance(feed, Experts)), len(feeds))
    if first == len(feeds):
        return {"first_k_dense_replace": first}
    experts = experts_of(config)
    router = experts.router
    return {
        "intermediate_size": dense_width(config),
        "moe_intermediate_size": experts.intermediate_size,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": 0
        if experts.shared is None
        else experts.shared.intermediate_size // experts.intermediate_size,
        "num_experts_per_tok": experts.top_k,
        "first_k_dense_replace": first,
        "norm_topk_prob": router.normalise,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
    }


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        architecture="DeepseekV2",
        aliases={"num_experts": "n_routed_experts"},
        architectures={"token-classification": None},
        has_experts=True,
        read=read_deepseek_v2,
        write=write_deepseek_v2,
        modules=DEEPSEEK_MODULES,
        stacked_modules=STACKED_MODULES,
        ropes_differ=True,
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 512,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_key_value_heads": None,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "v_head_dim": 128,
        },
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3",
        aliases={"num_local_experts": "n_routed_experts"},
        has_experts=True,
        has_mtp=True,
        mtp_keys=("num_nextn_predict_layers",),
        read=read_deepseek_v3,
        write=write_deepseek_v3,
        modules=DEEPSEEK_MODULES,
        stacked_modules=STACKED_MODULES,
        ropes_differ=True,
        defaults={
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": None,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "v_head_dim": 128,
        },
    ),
}
