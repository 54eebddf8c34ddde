"""The model families: how each one's config.json is read and written, and the names of its tensors on disk.

A file for each maker, or for each kind of its models, with a row of `FAMILIES` for each model_type. A row has a
family's particulars: the values that transformers takes for absent keys, the layers that only it has, and where its
tensor names leave Llama's. `family.py` defines a row, `layer_keys.py` the keys that several families share; the keys
that all have are in `hf_config.py`, next to this folder. Each `read_*` takes a config.json, a layer by the keys that
all families have, and the number of layers, and returns fields of ModelConfig; each `write_*` returns the keys of
config.json that `read_*` reads. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from danlu.models.families.family import Family

_FILES: Final = {
    "cohere": ("cohere2",),
    "deepseek": ("deepseek_v2", "deepseek_v3"),
    "ernie": ("ernie4_5",),
    "exaone": ("exaone4",),
    "gemma": ("gemma", "gemma2", "gemma3_text"),
    "gemma4": ("gemma4_text", "gemma4_unified_text"),
    "glm": ("glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    "gpt_neox": ("gpt_neox",),
    "gpt_oss": ("gpt_oss",),
    "granite": ("granite", "granitemoe", "granitemoehybrid"),
    "hunyuan": ("hunyuan_v1_dense",),
    "llama": ("llama", "smollm3"),
    "mfa": ("mfa",),
    "minimax": ("minimax_m2",),
    "mistral": ("ministral3", "mistral", "mixtral"),
    "olmo": ("olmo2", "olmo3", "olmoe"),
    "phi": ("phi3", "phimoe"),
    "qwen": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "qwen_linear": ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "seed": ("seed_oss",),
}
"""File -> the model_types of its rows."""


class _Families(Mapping[str, "Family"]):
    """The rows of all files, in the order of their names. A file is imported when a row of it is read."""

    def __init__(self) -> None:
        self._file_of = dict(sorted((name, file) for file, names in _FILES.items() for name in names))

    def __getitem__(self, model_type: str) -> Family:
        rows: dict[str, Family] = import_module(f"{__name__}.{self._file_of[model_type]}").FAMILIES
        return rows[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, model_type: object) -> bool:
        return model_type in self._file_of


FAMILIES: Mapping[str, Family] = _Families()
"""model_type -> family. Llama covers Llama 2 and 3, TinyLlama, SmolLM2; qwen2 covers Qwen2.5; phi3 covers phi-4."""

READ_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""model_type of folders that bring their own code along -> the family that computes the same, as which they are
written."""
