"""Small mixtures of experts, and what they compute, token by token, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from builders.small_config import small_config
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.experts import MoE
from danlu.models.initialize import initialize
from danlu.models.layer_spec import Dense, Experts, Router

MIXTRAL = Experts(8, 2, 24, router=Router(normalise=True))
DEEPSEEK_V3 = Experts(
    8,
    3,
    20,
    router=Router("sigmoid", True, 2.5, groups=4, top_groups=2, group_score="top-2", bias_correction=True),
    shared=Dense(32),
)
DEEPSEEK_V2 = Experts(8, 2, 16, router=Router(groups=4, top_groups=2, scale=1.5), shared=Dense(16))
QWEN2_MOE = Experts(6, 4, 16, shared=Dense(40), shared_gate=True)
BIASED = Experts(5, 2, 12, bias=True, router=Router(normalise=True, bias=True))
# Rows of 10 and 6 numbers are no multiples of 16 bytes.
ODD = Experts(4, 2, 6, router=Router(normalise=True))

KINDS = {
    "mixtral": MIXTRAL,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    "qwen2-moe": QWEN2_MOE,
    "biased": BIASED,
    "odd": ODD,
}

_SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
EXPERT_CONFIGS: dict[str, dict[str, Any]] = {
    family: {"model_type": family, **_SIZES, **own} for family, own in _OWN.items()
}
"""By family, the keys of a small config.json: of key heads that several query heads share, and of latent attention."""


def experts_config(feed: Experts, **sizes: int) -> ModelConfig:
    """A config of small layers, each with a mixture of experts."""
    return small_config(**sizes).with_layers(lambda layer: replace(layer, feed=feed))


def small_moe(feed: Experts, width: int, seed: int = 0) -> MoE:
    """One mixture with parameters of about unit gain: biases and corrections are drawn too."""
    moe = MoE(experts_config(feed, hidden_size=width), feed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            std = 0.3 if name.endswith(("bias", "correction")) else parameter.shape[-1] ** -0.5
            parameter.normal_(std=std, generator=generator)
    return moe


def small_decoder(feed: Experts, seed: int = 0, **sizes: int) -> Decoder:
    """A decoder of small layers with experts, initialised."""
    model = Decoder(experts_config(feed, **sizes))
    initialize(model, seed)
    return model


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What a gated network without biases makes of one token [D]."""
    return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


def one_by_one(moe: MoE, spec: Experts, x: Tensor) -> Tensor:
    """x [T, D] -> [T, D] float64: each token through its experts, one after the other, by the formulas.

    The oracle of mixtures: it sorts and groups nothing.
    """
    weights = {name: parameter.double() for name, parameter in moe.named_parameters()}
    zeros = torch.zeros((), dtype=torch.float64)

    def of_expert(name: str, expert: int, h: Tensor) -> Tensor:
        bias = weights[f"experts.{name}.bias"][expert] if spec.bias else zeros
        return weights[f"experts.{name}.weight"][expert] @ h + bias

    rows = []
    for token in x.double():
        logits = weights["router.weight"] @ token + weights.get("router.bias", zeros)
        scores = logits.softmax(0) if spec.router.score == "softmax" else logits.sigmoid()
        total = zeros.expand(len(token))
        chosen = _chosen((scores + weights.get("router.correction", zeros)).tolist(), spec)
        share = sum(scores[expert] for expert in chosen) if spec.router.normalise else 1.0
        for expert in chosen:
            hidden = torch.nn.functional.silu(of_expert("gate_proj", expert, token))
            hidden = hidden * of_expert("up_proj", expert, token)
            total = total + scores[expert] / share * spec.router.scale * of_expert("down_proj", expert, hidden)
        if spec.shared is not None:
            shared = _gated(token, *(weights[f"shared.{name}_proj.weight"] for name in ("gate", "up", "down")))
            gate = (weights["shared_gate.weight"] @ token).sigmoid() if spec.shared_gate else 1.0
            total = total + gate * shared
        rows.append(total)
    return torch.stack(rows)


def _chosen(scores: list[float], spec: Experts) -> list[int]:
    """The experts of a token with these scores, by sorting lists."""
    size = spec.num_experts // spec.router.groups
    groups = [list(range(start, start + size)) for start in range(0, spec.num_experts, size)]
    count = 1 if spec.router.group_score == "max" else 2

    def of_group(group: list[int]) -> float:
        return sum(sorted((scores[expert] for expert in group), reverse=True)[:count])

    best = sorted(groups, key=of_group, reverse=True)[: spec.router.top_groups]
    candidates = [expert for group in best for expert in group]
    return sorted(candidates, key=lambda expert: scores[expert], reverse=True)[: spec.top_k]
