"""Tensors put together from the shards of processes that must not contradict each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from danlu.verification.trace import LocalShards, assemble


def assemble_equal(shards_by_rank: Sequence[LocalShards]) -> dict[str, Tensor]:
    """Every tensor put together from the shards of all processes. Raises ValueError where copies of a box differ."""
    tensors, differing = assemble(shards_by_rank)
    if differing:
        raise ValueError(f"{next(iter(differing))}: processes that hold the same part of it differ")
    return tensors
