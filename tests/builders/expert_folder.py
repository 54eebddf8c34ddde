"""A model folder with experts, for runs of a tiny world."""

from __future__ import annotations

from pathlib import Path

import torch

from builders.tiny_world import CONFIG, World
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save

EXPERTS = {
    **CONFIG,
    "model_type": "deepseek_v3",
    "vocab_size": 400,
    "tie_word_embeddings": False,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}


def expert_folder(world: World) -> Path:
    """The folder of a small DeepSeek-V3, each of whose layers has experts, and a router with corrections."""
    folder = world.folder / "experts"
    if not folder.is_dir():
        model = build(read_config_values(EXPERTS))
        initialize(model, 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "experts" in name:
                    parameter.mul_(10)  # so that it makes a difference which one a token goes to
        save(model, folder, tokenizer_from=world.tokenizer)
    return folder
