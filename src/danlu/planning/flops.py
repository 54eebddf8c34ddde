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


def attention_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Counts (query, key) pairs of causal attention in documents; a query sees itself and `window` - 1 tokens before
    it."""
    pairs = 0
    for length in lengths:
        reach = length if window is None else min(length, window)
        pairs += reach * (reach + 1) // 2 + (length - reach) * reach
    return pairs


class DecoderFlops:
    """Operations of passes of one decoder over documents; the constants of its layers are counted once."""

    def __init__(self, config: ModelConfig) -> None:
        layers = {kind: config.layers.count(kind) for kind in config.kinds}
        self.weights = sum(count * kind.product_weights(config.hidden_size) for kind, count in layers.items())
        """Weights of all layers that one token is multiplied with: q, k, v, o, gate, up, down."""
        self._head = config.hidden_size * config.vocab_size
        self._mixers = [
            (count, kind.mixer.window, kind.mixer.pair_flops(), kind.token_flops()) for kind, count in layers.items()
        ]

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
