"""Floating-point operations of a decoder, in closed form. Imports no torch.

Counted as MFU counts them (PaLM, arXiv:2204.02311, appendix B): a multiply-add is two, only matrix products count, work
done again (recomputed activations) does not. Attention is counted as needed: causal, within documents, within windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from danlu.models.config import ModelConfig

# Backward makes two products (input and weight gradient) for each one of forward.
_TRAINING = 3
_FROZEN = 2


def layer_parameters(config: ModelConfig) -> int:
    """Weights of all layers that one token is multiplied with: q, k, v, o, gate, up, down."""
    of_kind = {kind: kind.product_weights(config.hidden_size) for kind in config.kinds}
    return sum(of_kind[layer] for layer in config.layers)


def attention_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Counts (query, key) pairs of causal attention in documents; a query sees itself and `window` - 1 tokens before
    it."""
    pairs = 0
    for length in lengths:
        reach = length if window is None else min(length, window)
        pairs += reach * (reach + 1) // 2 + (length - reach) * reach
    return pairs


def forward_flops(config: ModelConfig, lengths: Sequence[int], targets: int) -> int:
    """One forward pass over documents of `lengths` tokens, with the head on `targets` of them (those with a loss)."""
    linear = 2 * sum(lengths) * layer_parameters(config)
    of_kind = {kind: kind.mixer.pair_flops() * attention_pairs(lengths, kind.mixer.window) for kind in config.kinds}
    mixing = sum(of_kind[layer] + sum(lengths) * layer.token_flops() for layer in config.layers)
    return linear + mixing + 2 * targets * config.hidden_size * config.vocab_size


def training_flops(config: ModelConfig, lengths: Sequence[int], targets: int, *, frozen: bool = False) -> int:
    """Counts FLOPs of forward and backward with every weight trained; the gather of the embedding costs no products.

    frozen: gradients of inputs alone, as for adapters; their own products are not counted, as the price of the savings.
    """
    return (_FROZEN if frozen else _TRAINING) * forward_flops(config, lengths, targets)
