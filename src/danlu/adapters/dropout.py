"""Dropout whose mask is a function of (seed, step, site in the model, pack of the step, its token, feature) alone.

So it does not depend on how a step is cut into micro-batches or distributed over devices, a resumed run draws the masks
that an uninterrupted one would have, and the backward pass computes a mask again instead of keeping it.

T tokens · F features
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

# Odd multipliers and shifts of a 32-bit mixer that flips every output bit for half of all one-bit changes of the input
# (found by C. Wellons' search for low bias; public domain).
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)


class DropoutState:
    """The step and the packs that dropout masks are drawn for; one object, shared by every `Dropout` of a model."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._key: int | None = None  # of the step
        self._packs: tuple[tuple[int, int], ...] = ()
        self._token_keys: Tensor | None = None

    def begin(self, step: int, packs: Sequence[tuple[int, int]]) -> None:
        """Switches dropout on for one micro-batch.

        packs: of each pack of the micro-batch, its number within the step and how many tokens it has, in order.
        """
        self._key, self._packs = _hash(f"{self.seed}\0{step}"), tuple(packs)
        self._token_keys = None

    def end(self) -> None:
        """Switches dropout off, for evaluation and generation."""
        self._key = self._token_keys = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within it dropout is switched off, in the middle of a micro-batch."""
        key, self._key = self._key, None
        try:
            yield
        finally:
            self._key = key

    @property
    def active(self) -> bool:
        """Whether dropout is switched on."""
        return self._key is not None

    def token_keys(self, x: Tensor) -> Tensor:
        """[T] int32, the key of each token of the present micro-batch, which masks of all sites are drawn from.

        x: [T, F], any activations of the micro-batch; T may be more than its packs have, where it was padded.
        """
        assert self._key is not None, "dropout is switched off"
        if self._token_keys is None or self._token_keys.shape[0] != x.shape[0] or self._token_keys.device != x.device:
            tokens = [count for _, count in self._packs]
            assert sum(tokens) <= x.shape[0], f"{sum(tokens)} tokens, and activations of {x.shape[0]}"
            numbers = torch.tensor([number for number, _ in self._packs], dtype=torch.int32)
            keys = _mix(numbers + self._key).repeat_interleave(torch.tensor(tokens, dtype=torch.int64))
            # The mixer is applied twice, so that token t of pack n and token t + 1 of pack n - 1 have unrelated keys.
            offsets = torch.cat([torch.arange(count, dtype=torch.int32) for count in tokens])
            padded = F.pad(keys + offsets, (0, x.shape[0] - len(keys)))
            self._token_keys = _mix(padded).to(x.device)
        return self._token_keys


class Dropout:
    """Dropout of one site: each number is zeroed with probability p, and the others are scaled by 1 / (1 - p)."""

    def __init__(self, p: float, site: str, dropout_state: DropoutState) -> None:
        assert 0 <= p < 1, f"dropout {p}"
        self.p = p
        self.state = dropout_state
        self.first_feature = 0
        """Index of this process's first feature, where tensor parallelism cuts the features."""
        self._site_key = _hash(site)
        # A number is kept where a uniform int32 is at or above this: a fraction p of all int32 is below.
        self._threshold = int(p * 2**32) - 2**31

    @property
    def active(self) -> bool:
        """Whether a call may zero anything."""
        return self.p > 0 and self.state.active

    def __call__(self, x: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """x [T, F] with zeros where the mask says so; x itself while dropout is off.

        token_keys: [T] int32 of an earlier call (`DropoutState.token_keys`), to draw the mask of that call again.
        """
        if token_keys is None:
            if not self.active:
                return x
            token_keys = self.state.token_keys(x)
        first = self.first_feature
        columns = _mix(torch.arange(first, first + x.shape[1], dtype=torch.int32, device=x.device) + self._site_key)
        kept = _mix(token_keys.unsqueeze(1) + columns) >= self._threshold
        return x * kept * (1 / (1 - self.p))


def _mix(h: Tensor) -> Tensor:
    """A bijection of int32 whose outputs look random; products wrap on overflow.

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
