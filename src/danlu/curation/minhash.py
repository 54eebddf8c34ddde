"""MinHash signatures of sets, and keys of their bands: texts that share a key are likely alike (Broder 1997; LSH).

The share of equal values in two signatures estimates the Jaccard index of the sets. With b bands of r values, sets with
Jaccard index s share a key with probability 1 - (1 - s^r)^b.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from danlu.curation.ragged import Ragged
from danlu.curation.word_hashes import mix

EMPTY = np.uint32(0xFFFFFFFF)
"""Every value in the signature of an empty set."""
_CHUNK = 2048  # elements of a set that are permuted together: 1 MB with 112 permutations


def signatures(sets: Ragged, count: int) -> np.ndarray:
    """The signatures [N, count] uint32 of sets of well mixed uint64 hashes; repeated elements change nothing.

    A permutation is h -> a h + b modulo 2^32 with an odd a, applied to the upper half of a hash.
    """
    factors, offsets = _permutations(count)
    values = (sets.values >> np.uint64(32)).astype(np.uint32)
    result = np.full((len(sets), count), EMPTY, np.uint32)
    permuted = np.empty((_CHUNK, count), np.uint32)
    start = 0
    for number, stop in enumerate(sets.stops.tolist()):
        for first in range(start, stop, _CHUNK):
            chunk = values[first : min(first + _CHUNK, stop), None]
            into = permuted[: len(chunk)]
            np.multiply(chunk, factors, out=into)
            np.add(into, offsets, out=into)
            np.minimum(result[number], into.min(axis=0), out=result[number])
        start = stop
    return result


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """A uint64 key [N, bands] for each band of `rows` values of signatures [N, bands x rows]. Bands share no keys."""
    values = signatures.reshape(len(signatures), bands, rows)
    keys = np.broadcast_to(mix(np.arange(1, bands + 1, dtype=np.uint64)), values.shape[:2])
    for row in range(rows):
        keys = mix(keys ^ values[:, :, row])
    return keys


@cache
def _permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors and offsets [count] uint32; the first ones are the same whatever the count."""
    numbers = mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1), numbers.astype(np.uint32)
