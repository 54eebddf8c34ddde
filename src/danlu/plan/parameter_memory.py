"""What full training, LoRA and QLoRA hold for a model's parameters, counted byte by byte from its config. No torch.

Activations come on top; they depend on tokens, not on the method (`plan.activation_memory`).

==========  ====================================================================================================
full        float32 weights, gradients and two moments of Adam: 16 bytes a parameter
LoRA        matrices in bfloat16, norms and biases in float32; 16 bytes for each parameter of the adapter
QLoRA       linear layers in NF4 with double quantization, embedding and head in bfloat16, the rest as LoRA
==========  ====================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from danlu.models.config import ModelConfig, parameter_shapes
from danlu.recipe import Recipe
from danlu.recipe.sections.model import Fp4, Int4, Int8, Nf4, QuantizationSection

Method = Literal["full", "lora", "qlora"]
BLOCK, NESTED_BLOCK = 64, 256


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes by part, AdamW in float32 included (a step counter of 4 bytes for each tensor too)."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.adapter + self.gradients + self.optimizer


def parameter_bytes(config: ModelConfig, method: Method, *, rank: int = 8) -> ParameterBytes:
    """Bytes of training `config` with a method; adapters of `rank` on every linear layer but the head."""
    shapes = parameter_shapes(config)
    if method == "full":
        count = config.parameter_count()
        return ParameterBytes(4 * count, 0, 4 * count, 8 * count + 4 * len(shapes))
    linears = {name for name in shapes if name.endswith("_proj.weight")}
    weights = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        packed = method == "qlora" and name in linears
        weights += nf4_bytes(count) if packed else 2 * count if len(shape) == 2 else 4 * count
    adapter = sum(rank * sum(shapes[name]) for name in linears)
    return ParameterBytes(weights, 4 * adapter, 4 * adapter, 8 * adapter + 4 * 2 * len(linears))


def least_weight_bytes(recipe: Recipe, config: ModelConfig, processes: int) -> float:
    """Bytes that the weights alone take on one process, at the least: 4 of a trained one, 2 or half a byte of a frozen
    one; divided where `parallel.shard` or `parallel.tensor` shares them among the processes."""
    frozen = 0.5 if recipe.quantization is not None else 2.0 if recipe.precision != "fp32" else 4.0
    total = config.parameter_count() * (frozen if recipe.adapter is not None else 4.0)
    is_shared = recipe.parallel.shard != "none" or recipe.parallel.tensor > 1
    return total / processes if is_shared else total


def nf4_bytes(count: int) -> int:
    """`count` numbers in NF4 with double quantization: two codes a byte, a byte for each block of 64, and for each 256
    of those a float32; with one float32 offset (arXiv:2305.14314, section 3)."""
    return _four_bit_bytes(count, BLOCK, double=True)


def packed_bytes(shape: tuple[int, int], section: QuantizationSection) -> int:
    """Bytes of a matrix [O, I] that a section of the recipe packs: codes, and the scales of blocks or groups."""
    outputs, inputs = shape
    match section:
        case Nf4() | Fp4():
            return _four_bit_bytes(outputs * inputs, section.block, double=section.double)
        case Int8() | Int4():
            codes = inputs if section.kind == "int8" else -(-inputs // 2)
            return outputs * (codes + 4 * -(-inputs // section.group))
    raise AssertionError(f"no packing is known for {type(section).__name__}")


def _four_bit_bytes(count: int, block: int, *, double: bool) -> int:
    blocks = -(-count // block)
    scales = blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if double else 4 * blocks
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
