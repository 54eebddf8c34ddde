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
    **{f"model.{module}.": f"{LANGUAGE_PART}.{module}." for module in ("embed_tokens", "layers", "norm")},
    "lm_head.": "lm_head.",
}
"""Prefixes of the language part's names in folders -> in transformers' classes, which read all of them. The last but
one is that of Qwen2.5-VL, which is published with the names of a model that only reads.
"""
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_IMAGE_AXES = ("mrope_section", "mrope_interleaved")
"""The pairs of features that turn by time, height and width of an image's parts. The tokens of a text have the same
position along all three, so that the rotation is the plain one whatever these say.
"""
_OUTER_KEYS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""The keys for which a value next to text_config takes precedence, where it is given."""


@dataclass(frozen=True)
class Multimodal:
    """A class of transformers that has a decoder and other parts."""

    text_types: Mapping[str, str]
    """The types that its language part may be of -> the family that computes each."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of absent keys in its text_config, over those of the family (transformers 5.23)."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the family that its text_config cannot change: transformers computes with these values."""
    stacked_experts: bool = False
    """Whether the experts of a layer share two tensors in its published folders."""
    transposed_experts: bool = False
    """Whether matrices of these tensors are [inputs, outputs] in published folders. transformers 5 reads that by their
    shapes, and writes [outputs, inputs]."""
    image_keys: tuple[str, ...] = ()
    """Keys of its text_config that change the numbers of images alone: a result has them as they were."""
    may_be_flat: bool = False
    """Whether published files have the language part's keys next to vision_config, and no text_config."""


_GEMMA4_SIZES = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}
MULTIMODAL: dict[str, Multimodal] = {
    "gemma3": Multimodal(
        {"gemma3_text": "gemma3_text"},
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
    "gemma4": Multimodal({"gemma4_text": "gemma4_text"}, _GEMMA4_SIZES, image_keys=("use_bidirectional_attention",)),
    "gemma4_unified": Multimodal(
        {"gemma4_unified_text": "gemma4_unified_text"}, _GEMMA4_SIZES, image_keys=("use_bidirectional_attention",)
    ),
    "mistral3": Multimodal({"mistral": "mistral", "ministral3": "ministral3"}, {"tie_word_embeddings": True}),
    "qwen2_5_vl": Multimodal(
        {"qwen2_5_vl_text": "qwen2"},
        {
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
            "max_window_layers": 80,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        may_be_flat=True,
    ),
    "qwen3_5": Multimodal({"qwen3_5_text": "qwen3_5_text"}, {"tie_word_embeddings": False}),
    "qwen3_5_moe": Multimodal(
        {"qwen3_5_moe_text": "qwen3_5_moe_text"}, {"tie_word_embeddings": False}, stacked_experts=True
    ),
    "qwen3_vl": Multimodal(
        {"qwen3_vl_text": "qwen3"},
        {"max_position_embeddings": 128_000, "rope_theta": 5e5},
        {"use_sliding_window": False},
    ),
    "qwen3_vl_moe": Multimodal(
        {"qwen3_vl_moe_text": "qwen3_moe"},
        {
            "max_position_embeddings": 128_000,
            "num_experts_per_tok": 4,
            "rope_theta": 5e5,
        },
        {"use_sliding_window": False, "norm_topk_prob": True},
        stacked_experts=True,
        transposed_experts=True,
    ),
}
"""The multimodal classes by model_type of config.json."""


def text_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config of a multimodal model's language part, as one of a model of its own.

    Raises ModelError for a config.json without one, or with one that its model has not.
    """
    outer = values["model_type"]
    multimodal, text = MULTIMODAL[outer], _text_part(values)
    if not isinstance(text, dict):
        raise ModelError(f"{where}: {TEXT_CONFIG}: expected an object, found {text!r}")
    family = _text_family(outer, text, where)
    given = {key: values[key] for key in _OUTER_KEYS if values.get(key) is not None}
    if multimodal.may_be_flat and text.get("tie_word_embeddings"):  # an older place, which transformers reads there
        given["tie_word_embeddings"] = True
    inner = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    _check_computable(outer, inner, where)
    if family not in multimodal.text_types:
        inner |= {key: _plain_rope(inner[key]) for key in _ROPE_KEYS if isinstance(inner.get(key), dict)}
    quantized = {key: values[key] for key in ("quantization_config",) if key in values}
    known = {**multimodal.defaults, **inner, **given, **quantized, **multimodal.constants}
    return {**known, "model_type": family}


def _text_family(outer: str, text: Mapping[str, Any], where: str) -> str:
    """The family that computes a language part. Raises ModelError for one that its model has not."""
    types = MULTIMODAL[outer].text_types
    text_type = text.get("model_type", next(iter(types)) if len(types) == 1 else None)
    if text_type not in types:
        raise ModelError(
            f"{where}: {TEXT_CONFIG}.model_type: {text_type!r} is not supported in {outer}; supported: "
            f"{', '.join(types)}"
        )
    return types[str(text_type)]


def _check_computable(outer: str, inner: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for settings that transformers ignores, and for experts that no shape tells the sides of."""
    for key, value in MULTIMODAL[outer].constants.items():
        if inner.get(key, value) not in (value, None):
            raise ModelError(
                f"{where}: {TEXT_CONFIG}.{key}: {inner[key]!r}, but transformers computes {outer} with {value!r} "
                "whatever it says"
            )
    width, inner_width = inner.get("hidden_size"), inner.get("moe_intermediate_size")
    if (
        MULTIMODAL[outer].transposed_experts
        and isinstance(inner_width, int)
        and width in (inner_width, 2 * inner_width)
    ):
        raise ModelError(
            f"{where}: {TEXT_CONFIG}.moe_intermediate_size: matrices of experts are square at a hidden_size of "
            f"{width}, and folders of {outer} have them either way round, told by their shapes"
        )


def _text_part(values: Mapping[str, Any]) -> Any:
    """The object with the language part's keys: `text_config`, or where it may be flat, the file without the others."""
    if values.get(TEXT_CONFIG) is not None or not MULTIMODAL[values["model_type"]].may_be_flat:
        return values.get(TEXT_CONFIG)
    return {key: value for key, value in values.items() if key not in ("architectures", "model_type", "vision_config")}


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as a text needs them."""
    plain = {key: value for key, value in rope.items() if key not in _IMAGE_AXES}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in plain.items()
    }


def with_text_values(outer: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a multimodal model with another language part; outer: as it was. Its weights are dense."""
    before = _text_part(outer)
    inner = {key: value for key, value in text.items() if key != "architectures"}
    types = MULTIMODAL[outer["model_type"]].text_types
    inner["model_type"] = next(each for each, family in types.items() if family == text["model_type"])
    if inner["model_type"] != text["model_type"] and (axes := _image_axes(before)):
        inner["rope_scaling"] = {"rope_type": "default", **inner.get("rope_scaling", {}), **axes}
    inner |= {key: before[key] for key in MULTIMODAL[outer["model_type"]].image_keys if key in before}
    given = {key: text[key] for key in _OUTER_KEYS if key == "tie_word_embeddings" or outer.get(key) is not None}
    dtype_key = "torch_dtype" if "torch_dtype" in outer else "dtype"
    kept = {key: value for key, value in outer.items() if key != "quantization_config"}
    changed = {TEXT_CONFIG: inner}
    if outer.get(TEXT_CONFIG) is None:
        kept = {key: value for key, value in kept.items() if key not in _ROPE_KEYS}
        changed = {key: value for key, value in inner.items() if key not in ("model_type", "torch_dtype")}
    return kept | given | changed | {dtype_key: text["torch_dtype"]}


def _image_axes(text: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that only tokens of images need, of a language part's config."""
    ropes = [rope for key in _ROPE_KEYS if isinstance(rope := text.get(key), dict)]
    return {key: rope[key] for rope in reversed(ropes) for key in _IMAGE_AXES if key in rope}


def language_name(stored: str) -> str | None:
    """The name in transformers' classes of a tensor of the language part, by its name in a folder; None of others."""
    for prefix, own in _STORED_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None
