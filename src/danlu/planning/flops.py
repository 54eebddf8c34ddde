"""Floating-point operations of a decoder, in closed form. Imports no torch.

Counted as MFU counts them (PaLM, arXiv:2204.02311, appendix B): a multiply-add is two, only matrix products count, work
done again (recomputed activations) does not. Attention is counted as needed: causal, within documents, within windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from danlu.models.config import ModelConfig
from danlu.models.layer_operations import layer_operations
from danlu.models.layer_spec import Experts, LayerSpec
from danlu.models.operations import made_by

# Backward makes two products (input and weight gradient) for each one of forward.
_TRAINING = 3
_FROZEN = 2


def attention_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Counts (query, key) pairs of causal attention in documents; a query sees itself and `window` - 1 tokens before
    it."""
    pairs = 0
    for length in lengths:
        reach = length if window is None else min(length, window)
        pairs += reach * (reach + 1) // 2 + (length - reach) * reach
    return pairs


class LayerFlops(NamedTuple):
    """The products of one layer in its forward pass."""

    weights: int
    """Weights that one token is multiplied with; of experts, those of the token's own."""
    of_pair: int
    """Operations of one query on one key that it sees: scores, and the sum of values."""
    of_token: int
    """Operations of one token that are products with neither weights nor other tokens: with the states of a
    recurrence, which are read by its key, corrected, and read by its query."""


@cache
def layer_flops(spec: LayerSpec, width: int) -> LayerFlops:
    """Counts the products of a layer's operations; width: D."""
    operations = layer_operations(spec, width)
    values = made_by(operations)
    weights = of_pair = of_token = 0
    for operation in operations:
        match operation.kind:
            case "product":
                weights += math.prod(operation.weights[0][1])
            case "grouped":
                assert isinstance(spec.feed, Experts), "grouped products are those of experts"
                weights += spec.feed.top_k * math.prod(operation.weights[0][1][1:])
            case "attention":
                query, mixed = values[operation.reads[0]], operation.makes[0]
                of_pair += 2 * (query.width + mixed.width)
            case "scan":
                _, states = operation.makes
                of_token += 6 * states.width
    return LayerFlops(weights, of_pair, of_token)


class DecoderFlops:
    """Operations of passes of one decoder over documents; the constants of its layers are counted once."""

    def __init__(self, config: ModelConfig) -> None:
        kinds = [(layer_flops(kind, config.hidden_size), config.layers.count(kind), kind) for kind in config.kinds]
        of_embeddings = config.per_layer_columns * config.hidden_size
        self.weights = sum(count * own.weights for own, count, _ in kinds) + of_embeddings
        """Weights of all layers that one token is multiplied with: q, k, v, o, gate, up, down; and the matrix that
        makes layers' own embeddings.
        """
        self._head = config.hidden_size * config.vocab_size
        self._mixers = [(count, kind.mixer.window, own.of_pair, own.of_token) for own, count, kind in kinds]

    def forward(self, lengths: Sequence[int], targets: int) -> int:
        """One forward pass over documents of `lengths` tokens, with the head on `targets` of them (those with a
        loss)."""
        tokens = sum(lengths)
        mixing = sum(
            count * (by_pair * attention_pairs(lengths, window) + by_token * tokens)
            for count, window, by_pair, by_token in self._mixers
        )
        return 2 * tokens * self.weights + mixing + 2 * targets * self._head

    def training(self, lengths: Sequence[int], targets: int, *, frozen: bool = False) -> int:
        """Forward and backward with every weight trained; the gather of the embedding costs no products.

        frozen: gradients of inputs alone, as for adapters; their own products are not counted, as the price of the
        savings.
        """
        return (_FROZEN if frozen else _TRAINING) * self.forward(lengths, targets)
