"""Tiny bases of several families as folders, and what transformers and PEFT compute on them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from builders.tiny_adapters import DOCUMENTS

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "tied": {"tie_word_embeddings": True},
}
"""What makes `tiny_config` one of each."""
TOKENS = torch.randint(0, 64, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(5))


def hugging_face(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")


def theirs(model: Any) -> Tensor:
    """[T, V] of the documents of `logits`, one by one; a soft prompt's own logits are left out."""
    model.eval()
    pieces = [TOKENS[start:end] for start, end in pairwise(DOCUMENTS)]
    with torch.no_grad():
        return torch.cat([model(input_ids=piece.unsqueeze(0)).logits[0, -len(piece) :] for piece in pieces])
