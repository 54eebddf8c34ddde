"""Memory of a training step by part, in closed form. Imports no torch.

The counts follow what the decoder's operations keep for the backward pass; a test compares them with the tensors that
autograd really holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from danlu.plan.flops import Shape, attention_pairs


def activation_bytes(shape: Shape, lengths: Sequence[int], element_bytes: int) -> int:
    """What a micro-batch of documents of `lengths` tokens holds between forward and backward.

    Each layer keeps its input, two normed copies, q, k, v and their mixture, gate, up and their product; attention
    keeps a probability for each pair it looks at (at most: kernels that recompute keep none).
    """
    tokens = sum(lengths)
    heads = shape.heads * shape.head_dim
    grouped = shape.kv_heads * shape.head_dim
    per_token = 4 * shape.hidden_size + 2 * heads + 2 * grouped + 3 * shape.intermediate_size
    pairs = sum(shape.heads * attention_pairs(lengths, window) for window in shape.windows or (None,) * shape.layers)
    # 1.3: blocks of attention reach over the diagonal, and one layer's backward has temporaries of its own.
    return int(1.3 * element_bytes * (tokens * (shape.layers * per_token + 3 * shape.hidden_size) + pairs))


def largest_micro(shape: Shape, lengths: Sequence[int], element_bytes: int, budget_bytes: float, most: int) -> int:
    """The most packs, each of documents of `lengths` tokens, whose activations fit into the budget; at least 1."""
    each = activation_bytes(shape, lengths, element_bytes)
    return max(1, min(most, int(budget_bytes // each)))
