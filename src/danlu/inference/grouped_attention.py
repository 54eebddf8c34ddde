"""Attention over a cache in 4 bits: a query sees the tokens of its own block as they are, those before it decoded.

T tokens of a pass · H query heads · C head width · W width of a value · B tokens of a block · U blocks
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.inference.grouped_blocks import NewestTokens
from danlu.inference.paged import (
    ByQuery,
    ExpandedBlocks,
    OverBlocks,
    PagedAttention,
    Query,
    Run,
    Scoring,
    over_segments,
)
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan
from danlu.models.segments import Segment


class GroupedAttention(PagedAttention):
    """`PagedAttention` over a pool that keeps the newest tokens of sequences as they are."""

    def __init__(self, plan: Plan, pool: CachePool, newest: NewestTokens) -> None:
        self._newest = newest
        super().__init__(plan, pool)

    def _runs_of(
        self, kind: str, first: int, chunks: Sequence[Chunk], stops: Sequence[int]
    ) -> Iterator[tuple[slice, Run]]:
        if kind == "few":
            yield slice(stops[0], stops[-1]), _ByQuery(chunks, first, self.pool, self._newest)
            return
        for number, (chunk, (start, stop)) in enumerate(zip(chunks, itertools.pairwise(stops), strict=True), first):
            yield slice(start, stop), _OfChunk(number, chunk, self.pool, self._newest)


class _OfChunk:
    """Attention of a chunk of many tokens: for each of its blocks to those before it decoded, and to itself."""

    def __init__(self, number: int, chunk: Chunk, pool: CachePool, newest: NewestTokens) -> None:
        self._chunk, self._pool, self._newest = chunk, pool, newest
        self._begin = chunk.start // pool.block * pool.block  # of the block with its first token
        self._own = pool.index(newest.rows(number, self._begin, chunk.stop).tolist())
        self._blocks: dict[int, Tensor] = {}  # by the first of them

    def __call__(self, layer: int, q: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
        chunk, block, window = self._chunk, self._pool.block, scoring.window
        first = 0 if window is None else max(0, chunk.start - window + 1) // block
        before = (chunk.stop - 1) // block - first  # blocks that are read decoded
        own = tuple(x.index_select(0, self._own) for x in self._newest.entries(layer))
        stored, positions = own, [*range(self._begin, chunk.stop)]
        if before > 0:
            if first not in self._blocks:
                self._blocks[first] = self._pool.index(chunk.blocks[first : first + before])
            decoded = self._pool.gather(layer, self._blocks[first], before * block)
            stored = tuple(torch.cat(pair) for pair in zip(decoded, own, strict=True))
            positions = [*range(first * block, (first + before) * block), *positions]
        segments = tuple(self._segments(first, max(0, before) * block - self._begin))
        return over_segments(segments, q, stored, positions, keys, scoring)

    def _segments(self, first: int, moved: int) -> Iterator[Segment]:
        """Yields the chunk's tokens in each of its blocks. moved: from a position to the place of its own entry."""
        chunk, block = self._chunk, self._pool.block
        for start in range(self._begin, chunk.stop, block):
            stop = min(start + block, chunk.stop)
            before, own = (0, start - first * block), (start + moved, stop + moved)
            path = ((0, own[1]),) if before[1] == own[0] else (before, own) if before[1] > 0 else (own,)
            yield Segment(max(start, chunk.start) + moved, stop + moved, path)


class _ByQuery(ByQuery):
    """`ByQuery` of chunks from the one with the number `first` on."""

    def __init__(self, chunks: Sequence[Chunk], first: int, pool: CachePool, newest: NewestTokens) -> None:
        super().__init__(chunks, pool)
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        self._numbers = np.repeat(np.arange(first, first + len(chunks)), lengths).tolist()
        self._newest = newest

    @cached_property
    def _expanded(self) -> ExpandedBlocks:
        return _SeenBlocks(self._numbers, self._queries, self.pool, self._newest)


class _SeenBlocks(ExpandedBlocks):
    """The blocks that queries read as these see them: first those before their own, then their own ones.

    numbers: of each query's chunk.
    """

    def __init__(self, numbers: Sequence[int], queries: Sequence[Query], pool: CachePool, newest: NewestTokens) -> None:
        self._pool, self._newest, block = pool, newest, pool.block
        own = dict.fromkeys((number, at // block) for number, (_, at) in zip(numbers, queries, strict=True))
        before: dict[int, int] = {}  # block of the pool: its place in its sequences
        for blocks, at in queries:
            # The block that stands in the places of those that were given back comes last at its own one.
            before.update(zip(blocks[: at // block], itertools.count()))
        places = {key: place for place, key in enumerate(itertools.chain(before, own))}
        renumbered = [
            ((*(places[each] for each in blocks[: at // block]), places[number, at // block]), at)
            for number, (blocks, at) in zip(numbers, queries, strict=True)
        ]
        at_places = [*before.values(), *(place for _, place in own)]
        self._blocks = pool.index(list(before))
        self._own = pool.index(np.concatenate([newest.block_rows(*key) for key in own]).tolist())  # [U own * B]
        self._positions = pool.index([place * block + token for place in at_places for token in range(block)])
        self.over_blocks = OverBlocks(renumbered, block, pool.device)

    def decoded(self, layer: int) -> tuple[Tensor, ...]:
        """Returns a layer's entries [U, *lead, B, width] of these blocks, their own ones as they are."""
        seen = []
        for blocks, entries in zip(self._pool.tensors(layer), self._newest.entries(layer), strict=True):
            own = entries.index_select(0, self._own).unflatten(0, (-1, self._pool.block)).movedim(1, -2)
            seen.append(
                torch.cat((blocks.index_select(0, self._blocks), own)) if len(self._blocks) else own.contiguous()
            )
        return tuple(seen)
