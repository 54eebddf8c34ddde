"""Random transformers models of small configs, with which danlu's are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

DIFFERENCES = ("gemma_", "gemma2", "gemma3", "qwen3_5", "qwen3_next")
"""Beginnings of the types of families whose norms are stored as differences from one."""
LENGTH = 40
"""Tokens of the document that both compute."""


def twin(values: dict[str, Any], folder: Path) -> Any:
    """A random transformers model of this config, saved to `folder`; every parameter matters to its logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if "norm" in name or "bias" in name else 0.15))
            if name.endswith("scale"):
                parameter.mul_(2).add_(1.0)
            if "norm" in name and not f"{values['model_type']}_".startswith(DIFFERENCES):
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn(buffer.shape) * 0.3)
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(buffer.shape) * 0.3)
    model.save_pretrained(folder)
    return model


def random_tokens(vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(1))
