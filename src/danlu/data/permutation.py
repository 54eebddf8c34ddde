"""Order and chance as pure functions of a seed, in integer arithmetic of our own.

Nothing here holds a position or a generator: element i of an order, and the i-th draw, are computed from the key and i
alone. So workers, ranks, accumulation and interruptions cannot change which row comes n-th, and because no library
generator is involved (numpy's streams may change between versions, NEP 19) neither can an upgrade.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

ROUNDS = 8
SMALLEST_BITS = 6  # a Feistel network over fewer bits has too few different permutations

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key(seed: int, *path: int | str) -> int:
    """A 64-bit key for one purpose: `key(seed, "packs", epoch)`. Different paths give unrelated keys."""
    text = "\x1f".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(values: np.ndarray, key: int) -> np.ndarray:
    """Hash `values` [..] uint64 under `key`: splitmix64 (Steele et al., OOPSLA 2014) of key + value."""
    x = (values + np.uint64(key)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of 0..n-1 with elements that are computable one by one.

    A Feistel network over the smallest power of two that holds n, walked until the value falls below n ("cycle
    walking", Black and Rogaway, CT-RSA 2002): memory O(positions asked for), not O(n).
    """

    n: int
    key: int

    @classmethod
    def of(cls, n: int, seed: int, *path: int | str) -> Permutation:
        """A permutation of 0..n-1 for one purpose, see `key`."""
        return cls(n, key(seed, *path))

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The elements at `positions` [..] (integers in 0..n-1): [..] int64."""
        x = np.asarray(positions, dtype=np.uint64)
        if x.size and int(x.max()) >= self.n:
            raise IndexError(f"position {int(x.max())} of an order of {self.n}")
        flat = self._encrypt(x.ravel())
        outside = np.flatnonzero(flat >= self.n)
        while outside.size:
            flat[outside] = self._encrypt(flat[outside])
            outside = outside[flat[outside] >= self.n]
        return flat.reshape(x.shape).astype(np.int64)

    def all(self) -> np.ndarray:
        """The whole permutation: [n] int64."""
        return self.take(np.arange(self.n))

    def __getitem__(self, position: int) -> int:
        return int(self.take(np.array([position]))[0])

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        # The halves may differ by a bit; swapping names each round keeps the map a bijection on left x right.
        bits = max(SMALLEST_BITS, (self.n - 1).bit_length())
        low_bits, high_bits = bits // 2, bits - bits // 2
        low, high = x & np.uint64((1 << low_bits) - 1), x >> np.uint64(low_bits)
        for number in range(ROUNDS):
            round_key = (self.key ^ (number * 0xD1B54A32D192ED03)) & 0xFFFFFFFFFFFFFFFF
            high = high ^ (mix(low, round_key) & np.uint64((1 << high_bits) - 1))
            low, high = high, low
            low_bits, high_bits = high_bits, low_bits
        return (high << np.uint64(low_bits)) | low
