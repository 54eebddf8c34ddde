"""Functions that specs of layers share: bounds on sizes, and the shapes of parameters. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from danlu.core.errors import ModelError

Shapes = dict[str, tuple[int, ...]]
"""Name of a parameter, without its layer -> shape."""
Kept = Mapping[Literal["none", "elementwise", "selective"], float]
"""Kind of recomputation -> elements a token that are kept for the backward pass (with `none`: all that are made)."""

MAXIMUMS = {
    "heads": 2**20,
    "kv_heads": 2**20,
    "head_dim": 2**20,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**20,
    "qk_nope_head_dim": 2**20,
    "v_head_dim": 2**20,
    "query_rank": 2**20,
    "key_heads": 2**20,
    "key_dim": 2**20,
    "value_dim": 2**20,
    "conv_width": 2**10,
    "intermediate_size": 2**31 - 1,
    "num_experts": 2**16,
    "top_k": 2**16,
}
"""Bounds far above every published model, below which sizes can be multiplied and listed without harm."""


def check_sizes(sizes: Mapping[str, Any], maximums: Mapping[str, int] = MAXIMUMS) -> None:
    """Raises ModelError for a size below 1 or above its maximum; a name that is None, or not in `maximums`, is not
    checked.
    """
    for name, maximum in maximums.items():
        size = sizes.get(name)
        if size is None:
            continue
        if size < 1:
            raise ModelError(f"{name} is {size}: it must be at least 1")
        if size > maximum:
            raise ModelError(f"{name} is {size:,}: at most {maximum:,} can be built")


def linear_shapes(name: str, out_features: int, in_features: int, biased: bool) -> Shapes:
    """Weight and, if it has one, bias of a linear layer."""
    weight: Shapes = {f"{name}.weight": (out_features, in_features)}
    return weight | {f"{name}.bias": (out_features,)} if biased else weight


def stacked_shapes(name: str, count: int, out_features: int, in_features: int, biased: bool) -> Shapes:
    """Weights and, if they have them, biases of as many linear layers, one tensor of each: [count, out, in]."""
    weight: Shapes = {f"{name}.weight": (count, out_features, in_features)}
    return weight | {f"{name}.bias": (count, out_features)} if biased else weight
