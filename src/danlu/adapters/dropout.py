"""Dropout whose mask is a function of (seed, step, place in the model, pack of the step, its token, feature) alone.

So it does not depend on how a step is cut into micro-batches or spread over devices, a resumed run draws the masks that
an uninterrupted one would have, and the backward pass makes a mask again instead of keeping it.

T tokens · F features
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

# Odd multipliers and shifts of a 32-bit mixer that flips every output bit for half of all one-bit changes of the input
# (found by C. Wellons' search for low bias; public domain).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)


class DropoutState:
    """Where a model stands in a run: shared by all its dropouts, told by whoever runs it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._key: int | None = None  # of the step
        self._packs: tuple[tuple[int, int], ...] = ()
        self._rows: Tensor | None = None

    def begin(self, step: int, packs: Sequence[tuple[int, int]]) -> None:
        """Dropout from here on, for the tokens of some packs: (number in the step, tokens) of each."""
        self._key, self._packs = _hash(f"{self.seed}\0{step}"), tuple(packs)
        self._rows = None

    def end(self) -> None:
        """No dropout from here on: evaluation, generation."""
        self._key = self._rows = None

    @property
    def active(self) -> bool:
        return self._key is not None

    def token_keys(self, x: Tensor) -> Tensor:
        """[T] int32, one key for each token of the present micro-batch; x [T, F] is of it, and may be filled up."""
        assert self._key is not None, "there is no dropout now"
        if self._rows is None or self._rows.shape[0] != x.shape[0] or self._rows.device != x.device:
            tokens = [count for _, count in self._packs]
            assert sum(tokens) <= x.shape[0], f"{sum(tokens)} tokens were told of, and there are {x.shape[0]}"
            numbers = torch.tensor([number for number, _ in self._packs], dtype=torch.int32)
            keys = _mix(numbers + self._key).repeat_interleave(torch.tensor(tokens, dtype=torch.int64))
            offsets = torch.cat([torch.arange(count, dtype=torch.int32) for count in tokens])
            filled = F.pad(keys + offsets, (0, x.shape[0] - len(keys)))
            self._rows = _mix(filled).to(x.device)
        return self._rows


class Dropout:
    """Zeros a share p of the inputs of one place, and scales the rest by 1 / (1 - p)."""

    def __init__(self, share: float, place: str, dropout_state: DropoutState) -> None:
        assert 0 <= share < 1, f"dropout {share}"
        self.share = share
        self.state = dropout_state
        self.first_feature = 0
        """Number of the first feature that is here, where they are cut over processes."""
        self._place = _hash(place)
        # A mask is where a uniform int32 lies at or above this.
        self._threshold = int(share * 2**32) - 2**31

    @property
    def active(self) -> bool:
        return self.share > 0 and self.state.active

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [T, F] with its share of zeros. rows: those of an earlier call, to draw its mask again."""
        if rows is None:
            if not self.active:
                return x
            rows = self.state.token_keys(x)
        first = self.first_feature
        columns = _mix(torch.arange(first, first + x.shape[1], dtype=torch.int32, device=x.device) + self._place)
        kept = _mix(rows.unsqueeze(1) + columns) >= self._threshold
        return x * kept * (1 / (1 - self.share))


def _mix(h: Tensor) -> Tensor:
    """A bijection of int32 that looks random; overflow wraps.

    Bits that a right shift fills with the sign are cleared: left alone they would turn every negative number positive.
    """
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h.mul_(_FIRST)
    h ^= (h >> 15) & 0x1FFFF
    h *= _SECOND
    h ^= (h >> 16) & 0xFFFF
    return h


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little", signed=True)
