"""The few sizes that numbers of tokens are filled up to, so that shapes of products repeat. Imports no torch."""

from __future__ import annotations


def padding_to_bucket(count: int) -> int:
    """How much is missing to a multiple of a thirty-second of `count`, that rounded down to a power of two."""
    grain = 1 << max(0, (count // 32).bit_length() - 1)
    return -count % grain
