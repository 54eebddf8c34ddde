"""The memory of the language-model head and its losses, in closed form. Imports no torch.

N trained targets · D model width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

FLOAT32 = 4
# Bytes of one slice's float32 logits. On CPU they stay in the cores' caches; a GPU wants large products.
SLICE_BYTES_CPU = 4 * 2**20
SLICE_BYTES_CUDA = 128 * 2**20
NARROWEST_SLICE = 256
# Logits of a frozen head that are kept for the gradient, in the type of activations; a product over very few rows would
# be spent on reading the head.
KEPT_BYTES = 16 * 2**20
KEPT_BYTES_CUDA = 256 * 2**20
FEWEST_ROWS = 64


def slice_bytes(device_type: str) -> int:
    """Memory that the logits of a slice take, float32 and narrow copy together, in bytes."""
    return 2 * (SLICE_BYTES_CPU if device_type == "cpu" else SLICE_BYTES_CUDA)


def rows_per_slice(targets: int, device_type: str) -> int:
    """Returns S, the rows of the vocabulary with logits for `targets` targets that take half of `slice_bytes` in
    float32.
    """
    return max(NARROWEST_SLICE, slice_bytes(device_type) // 2 // (4 * max(1, targets)))


def workspace_bytes(
    targets: int, width: int, vocab_size: int, *, element_bytes: int, device_type: str, frozen: bool
) -> int:
    """Returns the peak memory of `linear_cross_entropy` without its inputs and the head's gradient, in bytes.

    targets, width, vocab_size: N, D, V. element_bytes: the size of an activation. frozen: the head needs no gradient
    and is stored in the type of activations.
    """
    room, is_half = slice_bytes(device_type) // 2, element_bytes < FLOAT32
    states = targets * width
    if frozen:  # logits of a block of rows, float32 logits and their gradient of a chunk of it, the states' gradient
        rows = min(targets, block_rows(vocab_size, element_bytes, device_type))
        chunk = min(rows, max(1, room // (4 * vocab_size)))
        copies = 2 if is_half else 1
        return rows * vocab_size * element_bytes + copies * chunk * vocab_size * FLOAT32 + states * element_bytes
    part = min(vocab_size, rows_per_slice(targets, device_type))
    narrow = element_bytes if is_half else 0
    # Logits become their gradient in their place; its product with the head is added to the states' float32 gradient.
    logits = targets * part * (FLOAT32 + narrow)
    products = targets * part * element_bytes + max(states * (narrow + FLOAT32), part * width * element_bytes)
    return max(logits, products) + states * FLOAT32 + part * width * narrow


def block_rows(vocab_size: int, element_bytes: int, device_type: str) -> int:
    """Rows of targets with logits at a time, where the head is frozen."""
    kept_bytes = KEPT_BYTES if device_type == "cpu" else KEPT_BYTES_CUDA
    return max(FEWEST_ROWS, kept_bytes // (element_bytes * vocab_size))
