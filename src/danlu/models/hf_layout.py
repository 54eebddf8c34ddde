"""Which tensors a Hugging Face folder holds, and which of our parameters each is made of. Pure data; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from danlu.layer_types import Site
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.families import FAMILIES

_TOP_LEVEL = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head", "norm": "model.norm"}

# Tables that old checkpoints carry; danlu computes them from the config.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"
"""The head [labels, D] of a model that classifies; transformers has the bias where each token is classified."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face folder: the parameters in `parts`, concatenated along the first axis."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]


def hf_tensors(config: ModelConfig) -> list[HFTensor]:
    """The tensors of this model's folder, in the order of the forward pass. A tied head is not stored."""
    modules = FAMILIES[config.family].modules
    shapes = parameter_shapes(config)
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(hf_name(name, modules), []).append(name)
    return [
        HFTensor(name, (sum(shapes[part][0] for part in fused), *shapes[fused[0]][1:]), tuple(fused))
        for name, fused in parts.items()
    ]


def config_sites(config: ModelConfig) -> list[Site]:
    """The places of a decoder where adapters may sit, in the order of its forward pass, without its modules: every
    linear layer, the embedding and the head over the vocabulary, where it has one.
    """
    modules = FAMILIES[config.family].modules
    shape = (config.vocab_size, config.hidden_size)
    sites = [Site("embed_tokens", "model.embed_tokens", "embedding", None, shape, None)]
    for parameter, sides in parameter_shapes(config).items():
        name, _, kind = parameter.rpartition(".")
        first, *rest = name.split(".")
        is_linear = kind == "weight" and len(sides) == 2 and not name.endswith(".router")
        if first == "layers" and is_linear:
            sites.append(Site(name, hf_name(name, modules), rest[1], int(rest[0]), (sides[0], sides[1]), None))
    if config.task != "causal-lm":
        return sites
    return [*sites, Site("lm_head", "lm_head", "head", None, shape, None)]


def hf_name(parameter: str, modules: Mapping[str, str]) -> str:
    """`layers.3.attention.q_proj.weight` -> `model.layers.3.self_attn.q_proj.weight`, by a family's `modules`."""
    head, *rest = parameter.split(".")
    if head != "layers":
        return ".".join((_TOP_LEVEL[head], *rest))
    index, *path = rest
    cut = next(cut for cut in range(len(path), 0, -1) if ".".join(path[:cut]) in modules)
    return ".".join(("model.layers", index, modules[".".join(path[:cut])], *path[cut:]))
