"""Tokenised samples as packing and batching see them: in memory, on disk, or a selection of several such stores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from danlu.core.types import Branch, Sample

BRANCH = np.dtype([("parent", "<i4"), ("start", "<i4"), ("stop", "<i4")])
"""A `danlu.core.types.Branch`, in a file."""
LABEL = np.dtype([("weight", "<f4"), ("reason", "u1")])
"""The label of a token: the loss weight and the reason for it (an index into the renderer's reasons)."""


class Samples(Protocol):
    """Samples by number. `row_numbers` says which row of its source a sample came from: a split row gives several."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray: ...  # [n] int32, tokens per sample

    @property
    def row_numbers(self) -> np.ndarray: ...  # [n] int64

    def sample(self, number: int) -> Sample: ...  # without a source: `Selection` gives it

    def reasons(self, number: int) -> np.ndarray: ...  # [S] uint8

    def digest(self) -> str: ...  # equal for equal tokens, weights, reasons and trees in the same order


class StoredSamples(Samples, Protocol):
    """The samples of one source."""

    @property
    def trees(self) -> TreeTable | None: ...  # None: every sample is one branch


@dataclass(frozen=True)
class TreeTable:
    """The branches of some samples, and the facts of each branch, as flat arrays."""

    offsets: np.ndarray  # [n + 1] int64, into branches
    branches: np.ndarray  # [M] BRANCH
    facts: Mapping[str, np.ndarray]  # [M] float32 each

    @classmethod
    def of(cls, trees: Sequence[tuple[Branch, ...]], facts: Sequence[Mapping[str, np.ndarray]]) -> TreeTable:
        """The trees of samples given one by one, all with the same facts."""
        branches = np.array([branch for tree in trees for branch in tree], BRANCH)
        by_name = {name: np.concatenate([values[name] for values in facts]).astype(np.float32) for name in facts[0]}
        return cls(_offsets(np.array([len(tree) for tree in trees])), branches, by_name)

    @classmethod
    def join(cls, tables: Sequence[TreeTable]) -> TreeTable:
        """The trees of `tables` one after another."""
        counts = np.concatenate([np.diff(table.offsets) for table in tables])
        facts = {name: np.concatenate([table.facts[name] for table in tables]) for name in tables[0].facts}
        return cls(_offsets(counts), np.concatenate([table.branches for table in tables]), facts)

    def given_to(self, sample: Sample, number: int) -> Sample:
        """Sample `number` with its branches and facts."""
        part = slice(self.offsets[number], self.offsets[number + 1])
        branches = tuple(Branch(*branch) for branch in self.branches[part].tolist())
        return replace(sample, branches=branches, facts={name: np.array(of[part]) for name, of in self.facts.items()})

    def arrays(self) -> Iterator[np.ndarray]:
        """Yields the arrays that a digest is made of."""
        yield from (self.offsets, self.branches)
        for name, values in self.facts.items():
            yield from (np.frombuffer(name.encode(), np.uint8), values)


@dataclass(frozen=True)
class SampleBlock:
    """Some samples in memory: flat arrays, with the labels (weight, reason) as codes into a palette."""

    tokens: np.ndarray  # [T] int32
    codes: np.ndarray  # [T] uint32, into palette
    palette: np.ndarray  # [L] LABEL
    lengths: np.ndarray  # [n] int32
    row_numbers: np.ndarray  # [n] int64
    rows: tuple[str, ...]  # [n] where each came from, for messages
    offsets: np.ndarray  # [n + 1] int64
    trees: TreeTable | None = None  # None: every sample is one branch

    @classmethod
    def of(
        cls,
        tokens: Sequence[np.ndarray],
        weights: Sequence[np.ndarray],
        reasons: Sequence[np.ndarray],
        row_numbers: Sequence[int],
        rows: Sequence[str],
        trees: TreeTable | None = None,
    ) -> SampleBlock:
        """A block of samples given one by one: tokens [S], weights [S], reasons [S] each."""
        lengths = np.array([len(ids) for ids in tokens], dtype=np.int32)
        bits = _flat(weights, np.float32).view(np.uint32).astype(np.uint64)
        keys = bits << np.uint64(8) | _flat(reasons, np.uint8)
        # One of each run of equal labels: sorting every token's would take as long as parsing the rows.
        starts = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
        labels, of_runs = np.unique(keys[starts], return_inverse=True)
        codes = np.repeat(of_runs, np.diff(starts, append=len(keys)))
        palette = np.empty(len(labels), LABEL)
        palette["weight"] = (labels >> np.uint64(8)).astype(np.uint32).view(np.float32)
        palette["reason"] = (labels & np.uint64(255)).astype(np.uint8)
        return cls(
            tokens=_flat(tokens, np.int32),
            codes=codes.astype(np.uint32),
            palette=palette,
            lengths=lengths,
            row_numbers=np.array(row_numbers, dtype=np.int64),
            rows=tuple(rows),
            offsets=_offsets(lengths),
            trees=trees,
        )

    @classmethod
    def join(cls, blocks: Sequence[SampleBlock]) -> SampleBlock:
        """The samples of `blocks` one after another."""
        bases = np.cumsum([0, *(len(block.palette) for block in blocks)])
        lengths = _flat([block.lengths for block in blocks], np.int32)
        trees = [block.trees for block in blocks if block.trees is not None]  # of one source: all have trees, or none
        return cls(
            tokens=_flat([block.tokens for block in blocks], np.int32),
            codes=_flat([block.codes + np.uint32(base) for block, base in zip(blocks, bases, strict=False)], np.uint32),
            palette=np.concatenate([np.empty(0, LABEL), *(block.palette for block in blocks)]),
            lengths=lengths,
            row_numbers=_flat([block.row_numbers for block in blocks], np.int64),
            rows=tuple(row for block in blocks for row in block.rows),
            offsets=_offsets(lengths),
            trees=TreeTable.join(trees) if trees else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, number: int) -> Sample:
        part = slice(self.offsets[number], self.offsets[number + 1])
        sample = Sample(self.tokens[part], self.palette["weight"][self.codes[part]], self.rows[number])
        return sample if self.trees is None else self.trees.given_to(sample, number)

    def reasons(self, number: int) -> np.ndarray:
        return self.palette["reason"][self.codes[self.offsets[number] : self.offsets[number + 1]]]

    def digest(self) -> str:
        trees = () if self.trees is None else self.trees.arrays()
        return _digest(self.tokens, self.palette[self.codes], self.offsets, *trees)


@dataclass(frozen=True)
class Selection:
    """Chosen samples of several stores, in a fixed order; a sample may occur more than once.

    A store holds the samples of one source, and the selection gives them its name: the name is not cached, so a file
    that is renamed is not tokenised again.
    """

    stores: tuple[StoredSamples, ...]
    sources: tuple[str, ...]  # [stores] the name of each
    store_numbers: np.ndarray  # [n] uint16
    sample_numbers: np.ndarray  # [n] int64

    @classmethod
    def all_of(cls, stores: Sequence[StoredSamples], sources: Sequence[str]) -> Selection:
        """Every sample of every store, once, in order. `sources` names each store's source."""
        return cls.some_of(stores, sources, [np.arange(len(store)) for store in stores])

    @classmethod
    def some_of(
        cls, stores: Sequence[StoredSamples], sources: Sequence[str], chosen: Sequence[np.ndarray]
    ) -> Selection:
        """Samples `chosen[i]` [..] of store i, store after store. `sources` names each store's source."""
        numbers = np.repeat(np.arange(len(stores), dtype=np.uint16), [len(samples) for samples in chosen])
        return cls(tuple(stores), tuple(sources), numbers, _flat(chosen, np.int64))

    def __len__(self) -> int:
        return len(self.sample_numbers)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(number) for number in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        return self._gather("lengths", np.int32)

    @property
    def row_numbers(self) -> np.ndarray:
        return self._gather("row_numbers", np.int64)

    def sample(self, number: int) -> Sample:
        store = self.store_numbers[number]
        return replace(self.stores[store].sample(int(self.sample_numbers[number])), source=self.sources[store])

    def reasons(self, number: int) -> np.ndarray:
        return self.stores[self.store_numbers[number]].reasons(int(self.sample_numbers[number]))

    def branches(self) -> tuple[np.ndarray, np.ndarray] | None:
        """([branches] BRANCH, [n + 1] int64 offsets into them) of all samples; None where they are no trees."""
        trees = [store.trees for store in self.stores]
        if not trees or any(tree is None for tree in trees):
            return None
        starts = np.concatenate([tree.offsets[:-1] for tree in trees if tree is not None])
        counts = np.concatenate([np.diff(tree.offsets) for tree in trees if tree is not None])
        branches = np.concatenate([tree.branches for tree in trees if tree is not None])
        of_stores = _offsets(np.array([len(tree.branches) for tree in trees if tree is not None]))
        chosen = _offsets(np.array([len(store) for store in self.stores]))[self.store_numbers] + self.sample_numbers
        offsets = _offsets(counts[chosen])
        first = starts[chosen] + of_stores[self.store_numbers]
        return branches[np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts[chosen])], offsets

    def digest(self) -> str:
        stores = np.array([store.digest() for store in self.stores], dtype="S16")
        return _digest(stores, self.store_numbers, self.sample_numbers)

    def _gather(self, name: str, dtype: type) -> np.ndarray:
        values: np.ndarray = np.empty(len(self), dtype)
        for number, store in enumerate(self.stores):
            is_from_store = self.store_numbers == number
            values[is_from_store] = getattr(store, name)[self.sample_numbers[is_from_store]]
        return values


def _flat(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
