"""The parts of the memory of a training step. They stand apart from other types, which a plan does without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of tensors at the peak of a training step; the field names are those of summary.json."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    logits: int
    packed: int = 0  # the dense copy of one matrix at a time of few bits; codes of weights that are trained for these
    gathered: int = 0  # parameters that are all-gathered for a while, of shards
    stash: int = 0  # versions of trained weights before the newest, for micro-batches in flight (PipeDream)

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(vars(self).values())
