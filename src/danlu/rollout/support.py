"""The tokens that sampling's filters left, kept for a trainer: ids or a bitmask, whichever is smaller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ID_BYTES = 4


@dataclass(frozen=True)
class Support:
    """A subset of a vocabulary. Exactly one of the two is there."""

    vocab_size: int
    sorted_ids: np.ndarray | None = None  # [K] int32, rising
    bitmask: np.ndarray | None = None  # [ceil(V / 8)] uint8, the lowest bit first

    @classmethod
    def of(cls, ids: np.ndarray, vocab_size: int) -> Support:
        """From ids [K], rising."""
        if ID_BYTES * len(ids) <= -(-vocab_size // 8):
            return cls(vocab_size, sorted_ids=ids.astype(np.int32))
        inside = np.zeros(vocab_size, dtype=bool)
        inside[ids] = True
        return cls(vocab_size, bitmask=np.packbits(inside, bitorder="little"))

    @property
    def ids(self) -> np.ndarray:
        """[K] int64, rising."""
        if self.sorted_ids is not None:
            return self.sorted_ids.astype(np.int64)
        assert self.bitmask is not None, "a support is ids or a bitmask"
        return np.flatnonzero(np.unpackbits(self.bitmask, count=self.vocab_size, bitorder="little"))

    @property
    def nbytes(self) -> int:
        """What it takes in memory, without Python's own."""
        stored = self.bitmask if self.sorted_ids is None else self.sorted_ids
        assert stored is not None
        return int(stored.nbytes)


def support_matrix(supports: list[Support]) -> np.ndarray:
    """[N, K] int64 for `objectives.token_logprobs`: ids of each token's support, -1 where it has fewer than K."""
    rows = [support.ids for support in supports]
    matrix = np.full((len(rows), max((len(row) for row in rows), default=0)), -1, dtype=np.int64)
    for place, row in zip(matrix, rows, strict=True):
        place[: len(row)] = row
    return matrix
