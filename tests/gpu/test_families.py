"""Experts, latent and linear attention, sinks and softcaps on the device, against float32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.generation import generate
from builders.small_experts import EXPERT_CONFIGS
from builders.tiny_run import VOCABULARY, SyntheticPacks, tiny_model

from danlu.inference.request import SamplingOptions
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.recompute import wrap
from danlu.models.decoder import Decoder
from danlu.stages.learner import DecoderLearner
from danlu.training.step import accumulate

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 4}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "experts whose rows are not aligned": {"model_type": "qwen3_moe", **EXPERTS, "moe_intermediate_size": 22},
    "deepseek_v3": {key: value for key, value in EXPERT_CONFIGS["deepseek_v3"].items() if key != "vocab_size"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **EXPERTS,
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 16,
    },
}


def model_of(family: str, device: torch.device) -> Decoder:
    return tiny_model(**FAMILIES[family] | SIZES).to(device)


def step(model: Decoder, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    device = next(model.parameters()).device
    learner = DecoderLearner(model, model, device, dtype, 2)
    loss = accumulate(learner, [SyntheticPacks().at(number) for number in range(4)], step=1, clip=None).loss
    named = model.named_parameters()
    dense = {
        name: each.grad.to_dense() if each.grad.is_sparse else each.grad
        for name, each in named
        if each.grad is not None
    }
    return loss, {name: gradient.cpu() for name, gradient in dense.items()}


def worst(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of a gradient; infinite where one is not finite."""
    assert got.keys() == wanted.keys() and got
    floor = 1e-3 * max(float(each.norm()) for each in wanted.values())
    errors = [float((got[name] - each).norm() / each.norm().clamp_min(floor)) for name, each in wanted.items()]
    return max(errors) if all(bool(each.isfinite().all()) for each in got.values()) else float("inf")


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_there_is_one_here(device: torch.device, family: str, recompute: bool) -> None:
    loss, gradients = step(model_of(family, torch.device("cpu")), torch.float32)
    model = model_of(family, device)
    if recompute:
        wrap(model, [LayerPlan(layer, "full") for layer in range(4)])
    there, got = step(model, torch.float32)
    assert there == pytest.approx(loss, rel=1e-5)
    assert worst(got, gradients) < 1e-3
    assert worst({name: 2 * gradient for name, gradient in got.items()}, gradients) > 0.5  # control


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_has_about_the_loss_of_float32(device: torch.device, family: str) -> None:
    """Gradients are only asked to be finite: a rounded score may send a token to another expert."""
    loss, _ = step(model_of(family, torch.device("cpu")), torch.float32)
    there, got = step(model_of(family, device), torch.bfloat16)
    assert there == pytest.approx(loss, rel=0.02)
    assert all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in got.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_writes_the_same_tokens(device: torch.device, family: str) -> None:
    prompts = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9]]
    here, there = (
        generate(model_of(family, where), prompts, SamplingOptions(temperature=0.0), 12, [])
        for where in (torch.device("cpu"), device)
    )
    assert [each.tokens for each in here] == [each.tokens for each in there]
    assert all(0 <= token < VOCABULARY for each in there for token in each.tokens)
