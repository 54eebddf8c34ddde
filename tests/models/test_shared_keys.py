"""Folders of Gemma 4 E2B as they are published: a model that sees, and tensors that nobody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.family_values import GEMMA4_E2B
from safetensors.torch import load_file, save_file

from danlu.core.errors import ModelError
from danlu.models.attend import PackedAttention
from danlu.models.hf_folder import check_headers, read_config
from danlu.models.loading import load
from danlu.models.saving import save

TOKENS = torch.randint(0, 119, (24,), generator=torch.Generator().manual_seed(1))
UNREAD = {
    f"model.language_model.layers.{layer}.self_attn.{name}.weight": torch.full((2, 3), float(layer))
    for layer in (2, 3)
    for name in ("k_proj", "v_proj", "k_norm")
}
"""Keys of layers that read those of others: transformers leaves them out too (`_keys_to_ignore_on_load_unexpected`)."""


def published(folder: Path) -> torch.Tensor:
    """Writes a random model of transformers' class to a folder, with `UNREAD`, and returns its logits."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text: dict[str, Any] = {
        **GEMMA4_E2B,
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 131,
        "max_position_embeddings": 64,
    }
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 32}
    torch.manual_seed(0)
    parts = {"text_config": text, "vision_config": vision, "audio_config": None}
    config = AutoConfig.for_model("gemma4", **parts, image_token_id=120)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if "norm" in name else 0.15))
            if "norm" in name:
                parameter.add_(1.0)
        model.save_pretrained(folder)
        save_file(load_file(folder / "model.safetensors") | UNREAD, folder / "model.safetensors", {"format": "pt"})
        answer: torch.Tensor = model(TOKENS[None]).logits[0]
        return answer


def test_a_published_folder_has_keys_that_nobody_reads(tmp_path: Path) -> None:
    """They reach the result as they are; those of a layer that has keys of its own are missed."""
    expected = published(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        hidden = model(TOKENS, torch.arange(len(TOKENS)), PackedAttention((0, len(TOKENS))))
        torch.testing.assert_close(model.logits(hidden), expected, atol=1e-5, rtol=0)
    save(model, tmp_path / "result", origin=tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "result"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    wrong = dict(before)
    wrong["model.language_model.layers.0.self_attn.x_proj.weight"] = wrong.pop(
        "model.language_model.layers.0.self_attn.k_proj.weight"
    )
    save_file(wrong, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="layers.0.self_attn.k_proj.weight: missing"):
        check_headers(tmp_path, read_config(tmp_path), quantized=False)
