"""How samples are laid into packs: pure functions from lengths to lists of indices."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from danlu.core.errors import DataError


@dataclass(frozen=True)
class PackingPlan:
    """Packs as flat arrays: pack i is segments `offsets[i]` to `offsets[i + 1]`; a segment is tokens of one sample."""

    samples: np.ndarray  # [segments] int64, index into the lengths given
    starts: np.ndarray  # [segments] int32
    stops: np.ndarray  # [segments] int32
    offsets: np.ndarray  # [packs + 1] int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pack(self, number: int) -> list[tuple[int, int, int]]:
        """The segments of one pack as (sample, start, stop)."""
        part = slice(self.offsets[number], self.offsets[number + 1])
        return list(
            zip(self.samples[part].tolist(), self.starts[part].tolist(), self.stops[part].tolist(), strict=True)
        )


def plan_packing(lengths: np.ndarray, kind: str, capacity: int, window: int) -> PackingPlan:
    """Samples of the given lengths [n], laid into packs of `capacity` tokens the way `packing.kind` says.

    Raises:
        DataError: a sample is longer than a pack (not for concatenate, which cuts).
    """
    if kind == "concatenate":
        return concatenate(lengths, capacity)
    too_long = np.flatnonzero(lengths > capacity)
    if too_long.size:
        first = int(too_long[0])
        raise DataError(
            f"sample {first} has {int(lengths[first])} tokens and does not fit a packed sequence of {capacity} "
            f"({too_long.size} such samples): raise data.max_length or let data.overlong shorten them"
        )
    packs = best_fit(lengths, capacity, window) if kind == "best-fit" else [[n] for n in range(len(lengths))]
    samples = np.fromiter((index for pack in packs for index in pack), dtype=np.int64, count=len(lengths))
    offsets = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    return PackingPlan(samples, np.zeros(len(samples), np.int32), lengths[samples].astype(np.int32), offsets)


def best_fit(lengths: np.ndarray, capacity: int, window: int) -> list[list[int]]:
    """Best-fit decreasing within each window of consecutive samples.

    Longest first, each sample goes into the fullest pack that still has room for it. The open packs are a sorted list
    of their free space, so a sample costs a bisection: about a microsecond, whatever the capacity. Every window is
    closed before the next begins, so a sample moves at most `window` places from where the order put it.

    Args:
        lengths: [n] integers, tokens per sample, each at most `capacity`.
        capacity: tokens in a pack.
        window: samples looked at together.

    Returns:
        For each pack the indices of its samples, rising. Ties go to the earlier sample and the earlier pack.
    """
    packs: list[list[int]] = []
    for start in range(0, len(lengths), window):
        part = lengths[start : start + window]
        longest_first = np.argsort(-part.astype(np.int64), kind="stable")
        packs += _fill(longest_first + start, part[longest_first], capacity)
    return packs


def _fill(indices: np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    # (free space, pack) as one integer: list operations on integers are several times faster than on tuples.
    shift = len(indices).bit_length()
    pack_mask = (1 << shift) - 1
    open_packs: list[int] = []
    packs: list[list[int]] = []
    for index, length in zip(indices.tolist(), lengths.tolist(), strict=True):
        place = bisect_left(open_packs, length << shift)
        if place == len(open_packs):
            pack, free = len(packs), capacity
            packs.append([index])
        else:
            entry = open_packs.pop(place)
            pack, free = entry & pack_mask, entry >> shift
            packs[pack].append(index)
        if free > length:
            insort(open_packs, (free - length) << shift | pack)
    for members in packs:
        members.sort()
    return packs


def concatenate(lengths: np.ndarray, capacity: int) -> PackingPlan:
    """Documents joined end to end and cut every `capacity` tokens.

    A document cut by a border goes on in the next pack as a segment of its own: positions restart there and attention
    does not look back over the border, exactly as if the segment were a document. Every token lies in one segment; the
    first of a segment has nothing before it and is context only.

    Args:
        lengths: [n] integers, tokens per document; documents of no tokens are left out.
        capacity: tokens in a pack; only the last pack is shorter.
    """
    ends = np.cumsum(lengths, dtype=np.int64)  # in the joined text
    total = int(ends[-1]) if len(ends) else 0
    borders = np.arange(capacity, total, capacity, dtype=np.int64)
    cuts = np.unique(np.concatenate([[0], ends, borders, [total]]).astype(np.int64))
    begins, stops = cuts[:-1], cuts[1:]
    samples = np.searchsorted(ends, begins, side="right")
    document_begins = ends[samples] - np.asarray(lengths, dtype=np.int64)[samples]
    offsets = np.append(np.searchsorted(begins, np.arange(0, total, capacity)), len(begins))
    return PackingPlan(
        samples.astype(np.int64),
        (begins - document_begins).astype(np.int32),
        (stops - document_begins).astype(np.int32),
        offsets.astype(np.int64),
    )


def efficiency(lengths: np.ndarray, packs: int, capacity: int) -> float:
    """Share of the packs' room that holds tokens; 1 for no packs at all."""
    return float(np.sum(lengths, dtype=np.int64)) / (packs * capacity) if packs else 1.0
