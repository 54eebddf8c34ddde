"""The endless sequence of packs over stored samples: pack n is a pure function of (samples, packing, seed, n).

How samples are laid into packs is a pure function from their lengths. Where lengths grow in stages, packs are numbered
within each stage.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from danlu.core.errors import CheckpointError, DataError
from danlu.core.types import Pack, Sample
from danlu.data.permutation import Permutation
from danlu.data.samples import Samples
from danlu.recipe.sections import Packing


class PackedDataset:
    """Samples shuffled by the seed, packed once, and walked in a new order of packs every epoch.

    Any pack can be asked for at any time, so a resumed run needs no more than its number.

    Attributes:
        packs_per_epoch: packs that hold every sample once.
        tokens_per_epoch: real tokens in them (there is no padding).
        efficiency: share of the packs' room that holds tokens.

    Raises:
        DataError: there are no samples, or one is longer than a pack.
    """

    def __init__(self, samples: Samples, packing: Packing, max_length: int, seed: int, *, shuffle: bool = True) -> None:
        if not len(samples):
            raise DataError("there are no samples to pack: every row was skipped, dropped or held out")
        self._samples = samples
        self._seed = seed
        self._shuffle = shuffle
        count = len(samples)
        self._order = Permutation.of(count, seed, "samples").all() if shuffle else np.arange(count)
        lengths = samples.lengths[self._order]
        self._layout = plan_packing(lengths, packing.kind, max_length, packing.window)
        self.packs_per_epoch = len(self._layout)
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        self.efficiency = efficiency(lengths, self.packs_per_epoch, max_length)
        described = f"{samples.digest()} {packing.kind} {packing.window} {max_length} {seed} {shuffle}"
        self._digest = hashlib.sha256(described.encode()).hexdigest()[:16]

    def at(self, number: int) -> Pack:
        """Pack `number` of the endless sequence; epoch = number // packs_per_epoch."""
        epoch, place = divmod(number, self.packs_per_epoch)
        if self._shuffle:
            place = Permutation.of(self.packs_per_epoch, self._seed, "packs", epoch)[place]
        return Pack(tuple(self._segment(*segment) for segment in self._layout.pack(place)))

    def epoch(self) -> Sequence[Pack]:
        """The packs of the first epoch in its order, each made when it is asked for."""
        return _Epoch(self)

    def state(self, number: int | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint, whichever pack comes next: a digest by which `restore` recognises the
        samples.
        """
        return {"samples": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Check that these are the packs the checkpoint was made with.

        Raises:
            CheckpointError: they are not.
        """
        if state != self.state():
            raise CheckpointError(
                "the training data is not what the checkpoint was made with "
                f"(samples {self._digest}, checkpoint {state.get('samples')}): the rows, tokenizer, packing or seed "
                "changed. Restore them, or start a new run"
            )

    def _segment(self, place: int, start: int, stop: int) -> Sample:
        sample = self._samples.sample(int(self._order[place]))
        return sample if (start, stop) == (0, len(sample.tokens)) else cut(sample, start, stop)


def rows_in_order(count: int, seed: int) -> np.ndarray:
    """[count] int64: the numbers of samples that are packs by themselves, in the order of the first epoch."""
    return Permutation.of(count, seed, "samples").take(Permutation.of(count, seed, "packs", 0).all())


@dataclass(frozen=True)
class _Epoch(Sequence[Pack]):
    dataset: PackedDataset

    def __len__(self) -> int:
        return self.dataset.packs_per_epoch

    @overload
    def __getitem__(self, index: int) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Pack]: ...
    def __getitem__(self, index: int | slice) -> Pack | Sequence[Pack]:
        numbers = range(len(self))[index]
        return self.dataset.at(numbers) if isinstance(numbers, int) else list(map(self.dataset.at, numbers))


def cut(sample: Sample, start: int, stop: int) -> Sample:
    """Tokens `start` to `stop` as a sample of its own: the first has nothing before it, so it is context only."""
    weights = sample.weights[start:stop].copy()
    weights[:1] = 0
    columns = {name: values[start:stop] for name, values in sample.columns.items()}
    return Sample(sample.tokens[start:stop], weights, sample.row, sample.source, columns=columns)


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


STAGE_ITEMS = 2**40
"""Numbers of packs that each stage has: pack n of stage k, counted from 0, is item k x 2^40 + n of the run. So where a
stage begins does not depend on how many packs those before it took, and a rewind may leave some out."""


class StagedPacks:
    """An `ItemSource`: pack n of a stage is a pure function of (samples, packing, seed, stage, n).

    Args:
        packs: of each stage, in order.
        lengths: tokens of a pack, of each stage.
    """

    def __init__(self, packs: Sequence[PackedDataset], lengths: Sequence[int]) -> None:
        self._packs, self._lengths = packs, lengths

    def at(self, number: int) -> Pack:
        """Item `number` of the run."""
        stage, place = divmod(number, STAGE_ITEMS)
        return replace(self._packs[stage].at(place), stage_length=self._lengths[stage])

    def state(self, number: int) -> dict[str, Any]:
        """Returns the state for a checkpoint: a digest of each stage's samples."""
        return {"stages": [packs.state() for packs in self._packs]}

    def restore(self, state: dict[str, Any]) -> None:
        """Checks that these are the packs the checkpoint was made with.

        Raises:
            CheckpointError: they are not.
        """
        kept = state.get("stages", [])
        if len(kept) != len(self._packs):
            raise CheckpointError(
                f"the checkpoint was made with {len(kept)} stages of lengths, the recipe has {len(self._packs)}. "
                "Restore them, or start a new run"
            )
        for packs, of_stage in zip(self._packs, kept, strict=True):
            packs.restore(of_stage)
