"""Floating-point operations of a decoder, in closed form. Imports no torch.

Counted as MFU counts them (PaLM, arXiv:2204.02311, appendix B): a multiply-add is two, only matrix products count, work
done again (recomputed activations) does not. Attention is counted as needed: causal, within documents, within windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from danlu.models.config import ModelConfig

# Backward makes two products (input and weight gradient) for each one of forward.
_TRAINING = 3
_FROZEN = 2


@dataclass(frozen=True)
class Shape:
    """What decides the cost of a decoder with gated MLPs."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, None = unlimited; empty when no layer has one."""


def shape_of(config: ModelConfig) -> Shape:
    """The sizes of a model that formulas go by."""
    return Shape(
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        windows=config.windows,
    )


def layer_parameters(shape: Shape) -> int:
    """Weights of one layer that take part in matrix products: q, k, v, o, gate, up, down."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.heads + shape.kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size


def attention_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """(query, key) pairs of causal attention in documents; a query sees itself and `window` - 1 tokens before it."""
    pairs = 0
    for length in lengths:
        reach = length if window is None else min(length, window)
        pairs += reach * (reach + 1) // 2 + (length - reach) * reach
    return pairs


def forward_flops(shape: Shape, lengths: Sequence[int], targets: int) -> int:
    """One forward pass over documents of `lengths` tokens, with the head on `targets` of them (those with a loss)."""
    windows = shape.windows or (None,) * shape.layers
    assert len(windows) == shape.layers, f"{len(windows)} windows for {shape.layers} layers"
    pairs_of = {window: attention_pairs(lengths, window) for window in set(windows)}
    linear = 2 * sum(lengths) * shape.layers * layer_parameters(shape)
    attention = 4 * shape.heads * shape.head_dim * sum(pairs_of[window] for window in windows)
    return linear + attention + 2 * targets * shape.hidden_size * shape.vocab_size


def training_flops(shape: Shape, lengths: Sequence[int], targets: int, *, frozen: bool = False) -> int:
    """Forward and backward with every weight trained; the gather of the embedding costs no products.

    frozen: gradients of inputs alone, as for adapters, whose own products are not counted: they are the price paid for
    what is saved.
    """
    return (_FROZEN if frozen else _TRAINING) * forward_flops(shape, lengths, targets)
