"""Tiny bases of several families as folders, and what transformers and PEFT compute on them."""

from __future__ import annotations

import copy
import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from builders.family_values import GEMMA4, GEMMA4_E2B
from builders.tiny_adapters import DOCUMENTS, adapter_set, logits, perturb
from danlu.adapters.adapter_set import AdapterSet
from danlu.models.loading import load

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "tied": {"tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4-moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 3,
        "intermediate_size": 24,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "gemma4-e2b": {
        **GEMMA4_E2B,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "gemma4": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "granite-4": {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention", "attention"],
        "position_embedding_type": "rope",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 64,
        "attention_multiplier": 0.35,
    },
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    },
}
"""What makes `tiny_config` one of each."""
TOKENS = torch.randint(0, 64, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(5))


def hugging_face(base: Path) -> Any:
    """A model of transformers that is the caller's own; a folder that has not changed is read once."""
    return copy.deepcopy(_read(base, tuple((file.name, file.stat().st_mtime_ns) for file in sorted(base.iterdir()))))


@functools.lru_cache(maxsize=16)
def _read(base: Path, files: tuple[tuple[str, int], ...]) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")


def save_adapter(model: Any, folder: Path) -> None:
    """Has PEFT write the adapter of a model, without a model card: its template takes longer than all the rest."""
    model.create_or_update_model_card = lambda *_: None
    model.save_pretrained(folder)


def theirs(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    """[T, V] of the documents of `logits`, one by one; a soft prompt's own logits are left out."""
    model.eval()
    pieces = [tokens[start:end] for start, end in pairwise(DOCUMENTS)]
    with torch.no_grad():
        return torch.cat([model(input_ids=piece.unsqueeze(0)).logits[0, -len(piece) :] for piece in pieces])


def perturbed_adapter(base: Path, section: Any, *, size: float) -> tuple[AdapterSet, Tensor, Tensor]:
    """(the adapters of a model, one of them, "mine", with numbers as after training; its logits; those of the base)."""
    model = load(base)
    adapters = adapter_set(model)
    without = logits(model, TOKENS)
    adapters.add("mine", section)
    adapters.train_only("mine")
    perturb(adapters, "mine", size=size)
    return adapters, logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids), without
