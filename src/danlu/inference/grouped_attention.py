"""Attention over a cache in 4 bits: a query sees the tokens of its own block as they are, those before it decoded.

T tokens of a pass · S stored entries that chunks read · H query heads · C head width · W width of a value
B tokens of a block · U blocks
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
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
    over_stored,
)
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Chunk, Plan
from danlu.models.block_attention import BlockSettings, QueryBlock

PRODUCT_ROWS = 128
"""Queries of a product, of several blocks: what they do not see of the blocks among them is computed and hidden."""
READ_TOKENS = 4096
"""The most tokens of several chunks, and of those before them, that are decoded together."""


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
        numbers = range(first, first + len(chunks))
        for several in _limited([_OfChunk(*each, self.pool.block) for each in zip(numbers, chunks, strict=True)]):
            begin, end = (several[place].number - first for place in (0, -1))
            yield slice(stops[begin], stops[end + 1]), _OfChunks(several, self.pool, self._newest)


class _OfChunk(NamedTuple):
    """A chunk of many tokens, by its number in the plan."""

    number: int
    chunk: Chunk
    block: int
    """The tokens of a block."""

    @property
    def begin(self) -> int:
        """The position where the block of its first token begins."""
        return self.chunk.start // self.block * self.block

    def decoded(self, window: int | None) -> range:
        """The places in its sequence of the blocks that are read decoded."""
        first = 0 if window is None else max(0, self.chunk.start - window + 1) // self.block
        return range(first, max(first, (self.chunk.stop - 1) // self.block))

    def queries(
        self, window: int | None, first: int, decoded_at: int, own_at: int, device: torch.device
    ) -> Iterator[QueryBlock]:
        """Yields its queries, those of several blocks in one product, with what they see of stored entries.

        first: of its queries among those of `_OfChunks`. decoded_at, own_at: where its decoded entries and its own ones
        begin among the stored ones.
        """
        chunk, block = self.chunk, self.block
        oldest_decoded = self.decoded(window).start * block
        for start in range(chunk.start, chunk.stop, PRODUCT_ROWS):
            rows = np.arange(start, min(start + PRODUCT_ROWS, chunk.stop))
            oldest = 0 if window is None else start - window + 1
            before = np.arange(max(oldest, oldest_decoded), rows[-1] // block * block)
            own = np.arange(start // block * block, rows[-1] + 1)
            of_rows = rows[:, None] // block
            unseen = np.concatenate((before // block >= of_rows, (own // block != of_rows) | (own > rows[:, None])), 1)
            if window is not None:
                unseen |= np.concatenate((before, own)) <= rows[:, None] - window
            parts = ((before, decoded_at - oldest_decoded), (own, own_at - self.begin))
            ranges = tuple((int(at[0]) + moved, int(at[-1]) + 1 + moved) for at, moved in parts if len(at))
            real = slice(first + start - chunk.start, first + start - chunk.start + len(rows))
            yield QueryBlock(real, ranges, True, None, copy_to(torch.from_numpy(unseen), device))


def _limited(chunks: Sequence[_OfChunk]) -> Iterator[Sequence[_OfChunk]]:
    """Yields neighbours that read `READ_TOKENS` tokens together at most, or are one that reads more."""
    several: list[_OfChunk] = []
    tokens = 0
    for each in chunks:
        tokens += each.chunk.stop
        if several and tokens > READ_TOKENS:
            yield several
            several, tokens = [], each.chunk.stop
        several.append(each)
    yield several


class _OfChunks:
    """Attention of chunks of many tokens to the blocks before each token's own one decoded, and to that as it is."""

    def __init__(self, chunks: Sequence[_OfChunk], pool: CachePool, newest: NewestTokens) -> None:
        self._chunks, self._pool, self._newest = chunks, pool, newest
        rows = [newest.rows(each.number, each.begin, each.chunk.stop) for each in chunks]
        self._own = pool.index(np.concatenate(rows).tolist())
        self._longest = max(each.chunk.stop - each.chunk.start for each in chunks)
        self._of_window: dict[int | None, _Reads] = {}

    def __call__(self, layer: int, q: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
        stored = tuple(x.index_select(0, self._own) for x in self._newest.entries(layer))
        if scoring.window not in self._of_window:
            self._of_window[scoring.window] = self._reads(scoring.window)
        reads = self._of_window[scoring.window]
        if len(reads.blocks):
            decoded = self._pool.gather(layer, reads.blocks, len(reads.blocks) * self._pool.block)
            stored = tuple(torch.cat(pair) for pair in zip(decoded, stored, strict=True))
        settings = BlockSettings((), scoring.scale, scoring.window, scoring.softcap, reads.queries)
        return over_stored(settings, q, stored, reads.positions, keys, scoring.sinks, longest=self._longest)

    def _reads(self, window: int | None) -> _Reads:
        block, decoded = self._pool.block, [each.decoded(window) for each in self._chunks]
        blocks = [
            each.chunk.blocks[place] for each, places in zip(self._chunks, decoded, strict=True) for place in places
        ]
        before = [position for places in decoded for position in range(places.start * block, places.stop * block)]
        own = [position for each in self._chunks for position in range(each.begin, each.chunk.stop)]
        queries: list[QueryBlock] = []
        first, decoded_at, own_at = 0, 0, len(before)
        for each, places in zip(self._chunks, decoded, strict=True):
            queries.extend(each.queries(window, first, decoded_at, own_at, self._pool.device))
            first += each.chunk.stop - each.chunk.start
            decoded_at += len(places) * block
            own_at += each.chunk.stop - each.begin
        return _Reads(self._pool.index(blocks), (*before, *own), tuple(queries))


class _Reads(NamedTuple):
    """The tokens that chunks read in layers with a window, and which of them queries see."""

    blocks: Tensor
    """[before] int64: those that are read decoded, chunk by chunk."""
    positions: Sequence[int]
    """[S] of the decoded tokens in their sequences, and of the own ones behind them, which begin with a block."""
    queries: tuple[QueryBlock, ...]


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
