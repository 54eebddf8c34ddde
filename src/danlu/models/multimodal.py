"""Folders of models that see or hear, of which the language part trains: its config and its tensors' names in them.

All other tensors (vision tower, projector) are untouched: they go from the folder that a model starts from to the
result byte for byte. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from danlu.core.errors import ModelError
from danlu.core.layer_types import LANGUAGE_PART

TEXT_CONFIG = "text_config"
_STORED_PREFIXES = {
    "language_model.model.": f"{LANGUAGE_PART}.",
    "language_model.lm_head.": "lm_head.",
    f"{LANGUAGE_PART}.": f"{LANGUAGE_PART}.",
    "lm_head.": "lm_head.",
}
"""Prefixes of the language part's names in folders -> in transformers' classes, which read both."""
_OUTER_KEYS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""The keys for which a value next to text_config takes precedence, where it is given."""


@dataclass(frozen=True)
class Multimodal:
    """A class of transformers that has a decoder and other parts."""

    text_types: tuple[str, ...]
    """The families that its language part may be of."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of absent keys in its text_config, over those of the family (transformers 5.23)."""
    stacked_experts: bool = False
    """Whether the experts of a layer share two tensors in its published folders."""


MULTIMODAL: dict[str, Multimodal] = {
    "gemma3": Multimodal(
        ("gemma3_text",),
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": Multimodal(("mistral", "ministral3"), {"tie_word_embeddings": True}),
    "qwen3_5": Multimodal(("qwen3_5_text",), {"tie_word_embeddings": False}),
    "qwen3_5_moe": Multimodal(("qwen3_5_moe_text",), {"tie_word_embeddings": False}, stacked_experts=True),
}
"""The multimodal classes by model_type of config.json."""


def text_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config of a multimodal model's language part, as one of a model of its own.

    Raises ModelError for a config.json without one, or with one that its model has not.
    """
    outer = values["model_type"]
    multimodal, text = MULTIMODAL[outer], values.get(TEXT_CONFIG)
    if not isinstance(text, dict):
        raise ModelError(f"{where}: {TEXT_CONFIG}: expected an object, found {text!r}")
    text_type = text.get("model_type", multimodal.text_types[0] if len(multimodal.text_types) == 1 else None)
    if text_type not in multimodal.text_types:
        raise ModelError(
            f"{where}: {TEXT_CONFIG}.model_type: {text_type!r} is not supported in {outer}; supported: "
            f"{', '.join(multimodal.text_types)}"
        )
    given = {key: values[key] for key in _OUTER_KEYS if values.get(key) is not None}
    inner = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    quantized = {key: values[key] for key in ("quantization_config",) if key in values}
    return {**multimodal.defaults, **inner, **given, **quantized, "model_type": text_type}


def with_text_values(outer: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a multimodal model with another language part; outer: as it was. Its weights are dense."""
    inner = {key: value for key, value in text.items() if key != "architectures"}
    given = {key: text[key] for key in _OUTER_KEYS if key == "tie_word_embeddings" or outer.get(key) is not None}
    dtype_key = "torch_dtype" if "torch_dtype" in outer else "dtype"
    kept = {key: value for key, value in outer.items() if key != "quantization_config"}
    return kept | given | {TEXT_CONFIG: inner, dtype_key: text["torch_dtype"]}


def language_name(stored: str) -> str | None:
    """The name in transformers' classes of a tensor of the language part, by its name in a folder; None of others."""
    for prefix, own in _STORED_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None
