"""Which tokens a forward pass computes, and where their keys and values go: data, decided without a model or torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of a sequence, which a forward pass computes. Those before `start` are cached."""

    sequence: int
    """The engine's number of the sequence, one answer of one request."""
    start: int
    stop: int
    blocks: Sequence[int]
    """Block i of the pool holds the tokens from i x block on; there are enough for `stop` tokens."""
    length: int
    """Tokens that the sequence is known to have, all of which rotary scalings that depend on the length count."""


@dataclass(frozen=True)
class Plan:
    """A forward pass, and what is done to the pool before it, in the order of the fields."""

    swapped_out: tuple[tuple[int, int], ...] = ()
    """(block of the pool, block of the host's pool): copied to the host."""
    swapped_in: tuple[tuple[int, int], ...] = ()
    """(block of the host's pool, block of the pool): copied back."""
    copies: tuple[tuple[int, int], ...] = ()
    """(from, to): blocks that several sequences share and that one is about to write in."""
    fresh: tuple[int, ...] = ()
    """Blocks that are written in from their beginning: cleared, since what was left in them may be NaN."""
    chunks: tuple[Chunk, ...] = ()
    """Those of one token first."""
    preempted: tuple[int, ...] = ()
    """Sequences that lost their place; they come back by themselves."""
