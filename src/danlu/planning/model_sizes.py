"""Shapes of published dense models, small to large, to say how large a model may be. Imports no torch.

The values are those of the config.json of each: Qwen/Qwen3-*, meta-llama/Llama-3.2-* and meta-llama/Meta-Llama-3.1-*.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values


def _llama(width: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
    }


def _qwen3(width: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, object]:
    return {
        **_llama(width, inner, layers, heads, tied=tied),
        "model_type": "qwen3",
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }


MODELS: Mapping[str, Mapping[str, object]] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Llama-3.2-3B": _llama(3072, 8192, 28, 24, tied=True),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128),
}
"""Name -> config.json, rising in parameters."""


@cache
def config_of_size(name: str) -> ModelConfig:
    """The config of one of `MODELS`."""
    return read_config_values(dict(MODELS[name]))
