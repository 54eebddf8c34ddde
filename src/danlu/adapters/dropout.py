"""Dropout with a mask that is a function of (seed, step, site in the model, pack of the step, its token, feature)
alone.

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
        self._rows: Tensor | None = None
        self._drawn_key: int | None = None  # of the step that `_packs`, `_rows` and `_token_keys` are of
        # By T, the share of the tokens and the device: a model may lie on several.
        self._token_keys: dict[tuple[torch.device, int, tuple[int, int]], Tensor] = {}

    def begin(self, step: int, packs: Sequence[tuple[int, int]], rows: Tensor | None = None) -> None:
        """Switches dropout on for one micro-batch.

        Args:
            packs: of each pack of the micro-batch, its number within the step and how many tokens it has, in order.
            rows: [t] int64 on the host, which of their tokens are here, in order; None: all.
        """
        key, packs = _hash(f"{self.seed}\0{step}"), tuple(packs)
        if (key, packs) != (self._drawn_key, self._packs) or not _same_rows(rows, self._rows):
            self._token_keys = {}  # else the micro-batch goes on, in the backward pass
        self._key, self._drawn_key, self._packs, self._rows = key, key, packs, rows

    def end(self) -> None:
        """Switches dropout off, for evaluation and generation, or until the micro-batch's backward pass begins."""
        self._key = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Switches dropout off within the block, in the middle of a micro-batch."""
        key, self._key = self._key, None
        try:
            yield
        finally:
            self._key = key

    @property
    def active(self) -> bool:
        """Whether dropout is switched on."""
        return self._key is not None

    def token_keys(self, x: Tensor, share: tuple[int, int] = (0, 1)) -> Tensor:
        """[T] int32, the key of each token of the present micro-batch, which masks of all sites are drawn from.

        x: [T, F], any activations of the micro-batch; T may be more than its packs have, where it was padded.
        share: see `Dropout.share`.
        """
        assert self._key is not None, "dropout is switched off"
        part, parts = share
        if (key := (x.device, x.shape[0], share)) not in self._token_keys:
            tokens = [count for _, count in self._packs]
            numbers = torch.tensor([number for number, _ in self._packs], dtype=torch.int32)
            keys = _mix(numbers + self._key).repeat_interleave(torch.tensor(tokens, dtype=torch.int64))
            # The mixer is applied twice, so that token t of pack n and token t + 1 of pack n - 1 have unrelated keys.
            offsets = torch.cat([torch.arange(count, dtype=torch.int32) for count in tokens])
            of_tokens = keys + offsets if self._rows is None else (keys + offsets)[self._rows]
            count = x.shape[0] * parts
            assert len(of_tokens) <= count, f"{len(of_tokens)} tokens, and activations of {count}"
            padded = F.pad(of_tokens, (0, count - len(of_tokens))).chunk(parts)[part]
            self._token_keys[key] = _mix(padded).to(x.device)
        return self._token_keys[key]


def leave_token_keys_uncompiled() -> None:
    """Excludes `DropoutState.token_keys` from torch.compile.

    Compilation makes constants of the tokens of packs and of a key of a dict: it would compile for every micro-batch,
    from the ninth on (torch's limit) not at all.
    """
    # No decorator: it would import torch._dynamo, a second that only a process which compiles should wait.
    DropoutState.token_keys = torch.compiler.disable(DropoutState.token_keys)  # type: ignore[method-assign]


def _same_rows(rows: Tensor | None, others: Tensor | None) -> bool:
    """Whether both are all tokens, or the same ones."""
    if rows is None or others is None:
        return rows is others
    return torch.equal(rows, others)


class Dropout:
    """Dropout of one site: each number is zeroed with probability p, and the others are scaled by 1 / (1 - p)."""

    def __init__(self, p: float, site: str, dropout_state: DropoutState) -> None:
        assert 0 <= p < 1, f"dropout {p}"
        self.p = p
        self.state = dropout_state
        self.first_feature = 0
        """Index of this process's first feature, where tensor parallelism cuts the features."""
        self.share = (0, 1)
        """The part of a micro-batch's tokens that is here, and the number of parts, where sequence parallelism cuts the
        tokens: in order, all of one size.
        """
        self._site_key = _hash(site)
        # A number is kept where a uniform int32 is at or above this: a fraction p of all int32 is below.
        self._threshold = int(p * 2**32) - 2**31

    @property
    def active(self) -> bool:
        """Whether a call may zero anything."""
        return self.p > 0 and self.state.active

    def token_keys(self, x: Tensor) -> Tensor:
        """[T] int32, the keys of the tokens of activations x [T, F]: see `DropoutState.token_keys`."""
        return self.state.token_keys(x, self.share)

    def __call__(self, x: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """x [T, F] with zeros where the mask says so; x itself while dropout is off.

        token_keys: [T] int32 of an earlier call, to draw the mask of that call again.
        """
        if token_keys is None:
            if not self.active:
                return x
            token_keys = self.token_keys(x)
        kept = _random(token_keys, self._site_key, self.first_feature, x.shape[1]) >= self._threshold
        return x * kept * (1 / (1 - self.p))


class SiteNumbers:
    """Random numbers of one site, drawn as a `Dropout`'s mask is: what routers that choose at random take
    (`sparse_mixer.Draws`).
    """

    def __init__(self, site: str, state: DropoutState) -> None:
        self._site, self._state = site, state

    @property
    def active(self) -> bool:
        """Whether a micro-batch of a training step goes through the model."""
        return self._state.active

    def uniform(self, x: Tensor, count: int, purpose: str) -> Tensor:
        """[T, count] float32 between 0 and 1, both excluded, for activations x [T, any]; other ones by purpose."""
        bits = _random(self._state.token_keys(x), _hash(f"{self._site}\0{purpose}"), 0, count)
        # 23 bits and a half: all of float32's digits.
        return (((bits >> 9) & 0x7FFFFF).float() + 0.5) / 2**23


def _random(token_keys: Tensor, site_key: int, first: int, count: int) -> Tensor:
    """[T, count] int32 for tokens with keys [T], and features from `first` on."""
    numbers = torch.arange(first, first + count, dtype=torch.int32, device=token_keys.device)
    return _mix(token_keys.unsqueeze(1) + _mix(numbers + site_key))


def _mix(h: Tensor) -> Tensor:
    """A bijection of int32 with outputs that look random; products wrap on overflow.

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
