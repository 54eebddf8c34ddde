"""Small random decoders, one for each kind of attention, and models to serve, as fixtures of every room."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from builders.adapter_folders import adapter_folder
from builders.bigram import bigram_folder
from builders.small_config import small_config
from builders.small_experts import QWEN2_MOE
from builders.tiny_world import World
from danlu.models.decoder import Decoder
from danlu.models.mixer_spec import Factorized, Latent
from danlu.models.rope_config import RopeScaling
from danlu.recipe import sections

if TYPE_CHECKING:
    from builders.served import Loaded

KINDS = {
    "llama": {},
    "window": {"windows": (5, None, 5)},
    "sliding": {"windows": (5, 9, 7)},
    "softcap": {"windows": (6, None, 6), "softcap": 3.0, "final_softcap": 5.0, "norms": "sandwich"},
    "qk-norm": {"qk_norm": "head", "kv_heads": 1},
    "delta": {"deltas": (0, 2)},
    "sinks": {"windows": (5, None, 5), "sinks": True, "output_gate": True},
    "latent": {
        "mixer": Latent,
        "q_lora_rank": 10,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "v_head_dim": 7,
    },
    "factorized": {"mixer": Factorized, "query_rank": 8},
    "key-reuse": {"mixer": Factorized, "query_rank": 10, "query_norm": True, "key_reuse": True},
    "experts": {},
}


def build(
    kind: str = "llama",
    *,
    layers: int = 3,
    vocab_size: int = 61,
    context: int = 512,
    seed: int = 0,
    rope_scaling: RopeScaling | None = None,
) -> Decoder:
    """Three layers, 4 query heads of width 8 on 2 key/value heads; weights large enough that greedy text varies.

    layers: another number, of the kinds that have all layers alike.
    """
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": context, "rope_scaling": rope_scaling}
    config = small_config(layers=layers, **sizes, **KINDS[kind])
    decoder = Decoder(config if kind != "experts" else config.with_layers(lambda layer: replace(layer, feed=QWEN2_MOE)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            is_matrix = parameter.ndim == 2 or ".experts." in name
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if is_matrix else 0.1))
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return decoder.requires_grad_(False)


@pytest.fixture(scope="session")
def small_decoder():
    """A function: kind, vocab_size, context, seed, rope_scaling -> Decoder."""
    return build


@pytest.fixture(scope="session")
def loaded(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A random model with two adapters, one of which puts virtual tokens before each prompt."""
    # Here: OpenAI's client takes a second to import, and most tests need none.
    from builders.served import Loaded

    root = tmp_path_factory.mktemp("adapters")
    lora = adapter_folder(tiny_world.base, root / "lora", sections.Lora(), seed=1, size=0.3)
    prompt = adapter_folder(tiny_world.base, root / "soft", sections.Prompt(tokens=3), seed=2, size=0.3)
    return Loaded.of(tiny_world.base, [lora, prompt], name="tiny")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model that never ends by itself."""
    from builders.served import Loaded

    return Loaded.of(
        bigram_folder(tmp_path_factory.mktemp("bigram") / "endless", "abcé", ends=False, context=1_000_000)
    )
