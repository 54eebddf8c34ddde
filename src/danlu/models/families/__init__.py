"""The model families: how each one's config.json is read and written, and what its tensors are called on disk.

A file for each maker, or for each kind of its models, with a row of `FAMILIES` for each model_type. A row says what is
a family's own: the values that transformers takes for absent keys, the layers that only it has, and where its tensor
names leave Llama's. `family.py` has what a row is, `layer_keys.py` and `expert_keys.py` what several families share;
the keys that all have are in `hf_config.py`, beside this folder. Each `read_*` takes a config.json, a layer by the keys
that all families have, and the number of layers, and returns fields of ModelConfig; each `write_*` returns the keys of
config.json that `read_*` reads. Nothing here imports torch.
"""

from __future__ import annotations

from danlu.models.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mfa,
    minimax,
    mistral,
    olmo,
    phi,
    qwen,
    qwen_linear,
    qwen_moe,
    smollm,
)
from danlu.models.families.family import Family

_FILES = (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mfa,
    minimax,
    mistral,
    olmo,
    phi,
    qwen,
    qwen_linear,
    qwen_moe,
    smollm,
)
FAMILIES: dict[str, Family] = dict(sorted(row for file in _FILES for row in file.FAMILIES.items()))
"""model_type -> family. Llama covers Llama 2 and 3, TinyLlama, SmolLM2; qwen2 covers Qwen2.5; phi3 covers phi-4."""

READ_AS = {"kimi_k2": "deepseek_v3"}
"""model_type of folders that bring their own code along -> the family that computes the same, as which they are
written."""
