"""Bytes of a model's parameters, counted from its config and recipe: at the least, packed, and gathered. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from danlu.models.config import ModelConfig
from danlu.recipe import Recipe
from danlu.recipe.sections.model import Int4, Int8, QuantizationSection

_NESTED_BLOCK = 256
"""Blocks of four-bit numbers that share one float32 for their scales under double quantization."""


def least_weight_bytes(recipe: Recipe, config: ModelConfig, processes: int) -> float:
    """Bytes that the weights alone take on one process, at the least: 4 of a trained one, 2 or half a byte of a frozen
    one; divided where `parallel.shard`, `tensor` or `expert` shares them among the processes."""
    frozen = 0.5 if recipe.quantization is not None else 2.0 if recipe.precision != "fp32" else 4.0
    total = config.parameter_count() * (frozen if recipe.adapter is not None else 4.0)
    parallel = recipe.parallel
    is_shared = parallel.shard != "none" or parallel.tensor > 1 or parallel.expert > 1
    return total / processes if is_shared else total


def packed_bytes(shape: Sequence[int], section: QuantizationSection) -> int:
    """Bytes of a matrix [O, I], or of several [E, O, I], that a section of the recipe packs: codes, and the scales of
    blocks or groups."""
    *stacked, outputs, inputs = shape
    return math.prod(stacked) * _matrix_bytes(outputs, inputs, section)


def _matrix_bytes(outputs: int, inputs: int, section: QuantizationSection) -> int:
    if isinstance(section, Int8 | Int4):
        codes = inputs if section.kind == "int8" else -(-inputs // 2)
        return outputs * (codes + 4 * -(-inputs // section.group))
    count = outputs * inputs
    blocks = -(-count // section.block)
    # Double quantization keeps a byte for each block, a float32 for each 256 of those, and one float32 offset
    # (arXiv:2305.14314, section 3).
    scales = blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4 if section.double else 4 * blocks
    return -(-count // 2) + scales


def gathered_bytes(layers: Sequence[int], rest: int, *, shard: str, prefetch: int) -> int:
    """The most bytes of whole parameters at a time that a process gathers from shards.

    layers: bytes of each layer's sharded parameters in the type in which they are gathered; rest: of the sharded
    parameters outside of layers. shard, prefetch: as `parallel.shard` and `parallel.prefetch` say.
    """
    match shard:
        case "none":
            return 0
        case "zero3":  # what lies outside of layers is resharded only after the backward pass
            return rest + sum(sorted(layers, reverse=True)[: 1 + prefetch])
        case _:
            return rest + sum(layers)
