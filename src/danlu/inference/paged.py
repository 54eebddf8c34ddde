"""Attention over a pool of cache blocks: the chunks of a plan, laid end to end, as an `Attend` of the decoder.

T tokens of a pass, flat · S tokens of one sequence · H query heads · K key/value heads · G = H / K · C head width
W width of a value · B tokens of a block
Q queries · U blocks · R queries that read a block · P pairs of a block and a query that reads it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.layer_types import Expand, Keys
from danlu.inference.scheduler import Chunk, Plan
from danlu.models.attend import PackedAttention, absorbed_keys
from danlu.models.block_attention import BlockAttention, BlockSettings, attention_scores
from danlu.models.recurrent_order import RecurrentRuns
from danlu.models.segments import Segment

if TYPE_CHECKING:
    from danlu.inference.pool import CachePool

# Chunks of up to so many tokens, such as a draft that is checked, are attended query by query.
FEW_TOKENS = 8
# Keys and values of up to so many bytes are copied together for torch's kernel: its one call costs less than those of
# products by block, until what is copied leaves the processor's caches. Measured on CPU with blocks of 16 tokens, 8
# heads on 4, one layer, in ms, gathered against by block: 1 x 256 tokens of width 32 0.03 against 0.10, 8 x 160 0.20
# against 0.36, 32 x 160 0.47 against 0.62, 16 x 640 3.4 against 1.3; of width 64 8 x 160 0.24 against 0.38, 32 x 160
# 1.9 against 1.0.
GATHERED_BYTES = 4 << 20
# But not where this many times as much would be copied as is seen, because one query sees more than the others.
MOST_PADDING = 1.25
# Blocks are read where they lie if at least this share of those between the first and the last are read at all.
# Otherwise they are copied together first, which takes as long as reading them twice more.
LEAST_DENSITY = 0.5


class Scoring(NamedTuple):
    """How scores are made of products, in one layer: see `Attend`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


Run = Callable[[int, Tensor, Keys, "Scoring"], Tensor]
"""Attention of some tokens of a pass: of a layer's queries [tokens, H, C] with the keys of these tokens."""
Query = tuple[Sequence[int], int]
"""The blocks of its sequence, and its position."""


class PagedAttention:
    """Writes keys and values of a plan's chunks into the pool, then has each token see those before it in its sequence.

    A `danlu.core.layer_types.Attend`. The plan has been carried out before. Whole prompts are attended as packed
    documents, by the kernels of training; chunks behind cached tokens over the gathered keys of their sequence; single
    tokens, and chunks of a few, all together.
    """

    def __init__(self, plan: Plan, pool: CachePool) -> None:
        self.pool = pool
        self._plan = plan
        self._runs: list[tuple[slice, Run]] = []
        self._rounded: dict[int, tuple[Tensor, ...]] = {}  # by layer, where entries are encoded
        start = first = 0
        for kind, several in itertools.groupby(plan.chunks, _kind):
            chunks = list(several)
            stops = list(itertools.accumulate((chunk.stop - chunk.start for chunk in chunks), initial=start))
            self._runs.extend(self._runs_of(kind, first, chunks, stops))
            start, first = stops[-1], first + len(chunks)

    def _runs_of(
        self, kind: str, first: int, chunks: Sequence[Chunk], stops: Sequence[int]
    ) -> Iterator[tuple[slice, Run]]:
        """Yields the attention of chunks of a kind, which are neighbours: tokens of the pass, and what computes them.

        first: the number of the first chunk. stops: [chunks + 1] where the chunks begin and end in the pass.
        """
        if kind == "whole":
            boundaries = tuple(stop - stops[0] for stop in stops)
            yield slice(stops[0], stops[-1]), partial(_within_chunks, PackedAttention(boundaries))
        elif kind == "few":
            yield slice(stops[0], stops[-1]), ByQuery(chunks, self.pool)
        else:
            for chunk, (start, stop) in zip(chunks, itertools.pairwise(stops), strict=True):
                yield slice(start, stop), _OfSequence(chunk, self.pool)

    @cached_property
    def runs(self) -> RecurrentRuns:
        """The recurrent runs of layers with a state: they continue from the cached states of the chunks' sequences."""
        assert self.pool.states is not None, "the pool keeps no states"
        return self.pool.states.runs(self._plan)

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        keys: Keys,  # of the same tokens
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [T, H, W]
        if keys.layer is None:
            stored = self.pool.write(layer, *keys.stored)
            if self.pool.is_encoded:  # every query sees what later ones will, whatever the chunks are
                self._rounded[layer], keys = stored, replace(keys, stored=stored)
        else:  # they are in the cache of the layer that made them, which has run in this pass
            layer = keys.layer
            if self.pool.is_encoded:
                keys = replace(keys, stored=self._rounded[layer])
        scoring = Scoring(scale, window, softcap, sinks)
        if len(self._runs) == 1:
            return self._runs[0][1](layer, q, keys, scoring)
        return torch.cat([attend(layer, q[rows], self._keys_of(keys, rows), scoring) for rows, attend in self._runs])

    def _keys_of(self, keys: Keys, rows: slice) -> Keys:
        """The keys of some tokens of the pass."""
        stored = tuple(x[rows] for x in keys.stored)
        if (expand := keys.expand) is None:
            return Keys(stored)
        positions = self._positions[rows]
        return Keys(stored, lambda x, at=None: expand(x, positions if at is None else at), keys.absorb)

    @cached_property
    def _positions(self) -> Tensor:
        """The positions of the tokens, [T] int64."""
        return self.pool.index([at for chunk in self._plan.chunks for at in range(chunk.start, chunk.stop)])


def _within_chunks(attend: PackedAttention, layer: int, q: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
    """Attention of chunks that are whole sequences so far: nothing is read from the pool."""
    return attend(layer, q, keys, **scoring._asdict())


def _kind(chunk: Chunk) -> str:
    if chunk.start == 0 and chunk.stop > 1:
        return "whole"
    return "few" if chunk.stop - chunk.start <= FEW_TOKENS else "many"


class _OfSequence:
    """Attention of a chunk of many tokens to its sequence's cached tokens, and to itself."""

    def __init__(self, chunk: Chunk, pool: CachePool) -> None:
        self.chunk, self.pool = chunk, pool
        self._blocks: dict[int, Tensor] = {}  # by the first of them

    def __call__(self, layer: int, q: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
        chunk, block, window = self.chunk, self.pool.block, scoring.window
        first = 0 if window is None else max(0, chunk.start - window + 1) // block
        if first not in self._blocks:
            self._blocks[first] = self.pool.index(chunk.blocks[first : -(-chunk.stop // block)])
        tokens = chunk.stop - first * block
        stored = self.pool.gather(layer, self._blocks[first], tokens)
        segment = Segment(chunk.start - first * block, tokens, ((0, tokens),))
        settings = BlockSettings((segment,), scoring.scale, window, scoring.softcap)
        return over_stored(settings, q, stored, range(first * block, chunk.stop), keys, scoring.sinks)


def over_stored(
    settings: BlockSettings,
    q: Tensor,
    stored: tuple[Tensor, ...],
    positions: Sequence[int],
    keys: Keys,
    sinks: Tensor | None,
    *,
    longest: int | None = None,
) -> Tensor:
    """Attention of queries [queries, H, C] to stored entries [S, *lead, C] -> [queries, H, W].

    positions: [S] of the entries in their sequences. keys: how they become keys and values. longest: the most queries
    of one sequence, where there are several.
    """
    queries = len(q) if longest is None else longest
    absorb = keys.absorb if keys.absorb is not None and queries < keys.absorb.fewest_expanded else None
    if absorb is not None:
        q = absorb.queries(q)
        k, v = absorbed_keys(stored, absorb)
    elif keys.expand is not None:
        k, v = keys.expand(stored, torch.tensor(positions, device=q.device))
    else:
        k, v = stored  # [S, K, C]
    out: Tensor = BlockAttention.apply(q, k, v, settings, sinks)
    return out if absorb is None else absorb.outputs(out)


class ByQuery:
    """Attention of queries of many sequences, each over the blocks it sees.

    Little is copied together first, query by query, which takes few calls. Of more no key is copied: those of a block
    are multiplied where they lie by all queries that read it, such as those of several answers to one prompt. So the
    work is that of the tokens that are seen, and those that are seen by several are read once.
    """

    def __init__(self, chunks: Sequence[Chunk], pool: CachePool) -> None:
        self.pool = pool
        self._queries = [(chunk.blocks, position) for chunk in chunks for position in range(chunk.start, chunk.stop)]
        single = all(chunk.stop - chunk.start == 1 for chunk in chunks)
        self._rows = pool.decode_buffers.rows_of(chunks, pool.token_bytes) if single else None
        self._longest = max(chunk.stop for chunk in chunks)
        self._over_pool = OverBlocks(self._queries, pool.block, pool.device)

    def __call__(self, layer: int, q: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
        stored, absorb = self.pool.tensors(layer), keys.absorb
        if keys.expand is not None and absorb is None:
            blocks = self._expanded.keys_and_values(keys.expand, layer)
            return self._expanded.over_blocks(q, blocks, None, scoring)
        width = None if absorb is None else absorb.value_width
        q = q if absorb is None else absorb.queries(q)
        sees_all = scoring.window is None or scoring.window >= self._longest
        if self._rows is not None and scoring.softcap is None and sees_all:
            sinks = scoring.sinks
            out = self._rows.attend(layer, q, keys.stored, stored, scoring.scale, value_width=width, sinks=sinks)
        elif self.pool.is_encoded:
            out = self._expanded.over_blocks(q, self._expanded.decoded(layer), width, scoring)
        else:
            out = self._over_pool(q, tuple(x for x in stored if isinstance(x, Tensor)), width, scoring)
        return out if absorb is None else absorb.outputs(out)

    @cached_property
    def _expanded(self) -> ExpandedBlocks:
        return ExpandedBlocks(self._queries, self.pool)


class ExpandedBlocks:
    """Keys and values of the blocks that queries read, each block once: expanded from stored entries, or decoded."""

    def __init__(self, queries: Sequence[Query], pool: CachePool) -> None:
        places: dict[int, int] = {}  # of a block among these
        positions: list[int] = []
        renumbered = []
        for blocks, position in queries:
            read = blocks[: position // pool.block + 1]
            for index, number in enumerate(read):
                if number not in places:  # sequences that share a block begin alike: it is at one place in all of them
                    places[number] = len(places)
                    positions.extend(range(index * pool.block, (index + 1) * pool.block))
            renumbered.append((tuple(places[number] for number in read), position))
        self._pool = pool
        self._blocks = pool.index(list(places))  # [U] int64, in the pool
        self._positions = pool.index(positions)  # [U * B] int64, of the tokens in their sequences
        # Of these blocks by their place among them.
        self.over_blocks = OverBlocks(renumbered, pool.block, pool.device)

    def decoded(self, layer: int) -> tuple[Tensor, ...]:
        """Returns a layer's stored entries [U, *lead, B, width] of these blocks."""
        return tuple(x.index_select(0, self._blocks) for x in self._pool.tensors(layer))

    def keys_and_values(self, expand: Expand, layer: int) -> tuple[Tensor, ...]:
        """Expands a layer's stored entries to keys [U, K, B, C] and values [U, K, B, W]."""
        stored = [x.movedim(-2, 1).flatten(0, 1) for x in self.decoded(layer)]  # [U*B, *lead, width]
        shape = len(self._positions) // self._pool.block, -1
        return tuple(x.unflatten(0, shape).transpose(1, 2).contiguous() for x in expand(stored, self._positions))


class OverBlocks:
    """Attention of queries over blocks of keys and values; see `ByQuery`."""

    def __init__(self, queries: Sequence[Query], block: int, device: torch.device) -> None:
        self._queries, self._block, self._device = queries, block, device
        self._tables: dict[tuple[int | None, int], _Table | None] = {}  # by window and key/value heads
        self._readings: dict[int | None, _Reading] = {}  # by window

    def __call__(self, q: Tensor, blocks: tuple[Tensor, ...], value_width: int | None, scoring: Scoring) -> Tensor:
        """Computes attention of q [Q, H, C] to blocks: keys [N, K, B, C] and values [N, K, B, W], or keys alone with
        values in their first `value_width` features; sinks [H] -> [Q, H, W]."""
        keys, values = blocks if value_width is None else (blocks[0], blocks[0][..., :value_width])
        plain = scoring.softcap is None and scoring.sinks is None
        if plain and (table := self._table(scoring.window, blocks)) is not None:
            q = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])  # [Q, K, G, C]
            k = table.gather(keys)  # [Q, K, S, C]
            v = table.gather(values) if value_width is None else k[..., :value_width]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=table.mask, scale=scoring.scale).flatten(1, 2)
        return self._by_reading(q, keys, values, scoring)

    def _table(self, window: int | None, blocks: tuple[Tensor, ...]) -> _Table | None:
        """The blocks of all queries side by side; None where they are too much to copy."""
        keys = blocks[0]
        heads, block = keys.shape[1:3]
        width = sum(x.shape[-1] for x in blocks)
        if (window, heads) not in self._tables:
            firsts = [_first_seen(position, window) for _, position in self._queries]
            counts = [
                position // block - first // block + 1
                for first, (_, position) in zip(firsts, self._queries, strict=True)
            ]
            gathered = len(counts) * max(counts)
            small = gathered * heads * block * width * keys.itemsize <= GATHERED_BYTES
            self._tables[window, heads] = (
                _Table.of(self._queries, firsts, max(counts), block, heads, keys)
                if small and gathered <= MOST_PADDING * sum(counts)
                else None
            )
        return self._tables[window, heads]

    def _by_reading(self, q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        scale, window, softcap, sinks = scoring
        if window not in self._readings:
            self._readings[window] = _Reading.of(self._queries, window, self._block, self._device)
        reading = self._readings[window]
        kv_heads, width = keys.shape[1], keys.shape[3]
        scores, most = [], []
        for part, own in zip(reading.parts, reading.of_pairs(q.flatten(1)), strict=True):
            rows = part.by_block(own, kv_heads).reshape(part.blocks * kv_heads, -1, width)  # [U*K, R*G, C]
            products = attention_scores(rows, part.of(keys).flatten(0, 1), scale)  # [U*K, R*G, B]
            if softcap is not None:
                products.div_(softcap).tanh_().mul_(softcap)
            products = products.view(part.blocks, kv_heads, part.readers, -1, products.shape[-1])
            products += part.hidden
            scores.append(products)
            most.append(part.by_pair(products.amax(-1)))
        # Of each query and head, over its blocks: the largest score, and the sum of what is exponentiated, [Q, H].
        largest = F.embedding_bag(reading.bags, _concatenated(most), reading.offsets, mode="max")
        if sinks is not None:
            largest = torch.maximum(largest, sinks.to(largest.dtype))
        sums, outputs = [], []
        for part, products, own in zip(reading.parts, scores, reading.of_pairs(largest), strict=True):
            products.sub_(part.by_block(own, kv_heads).unsqueeze(-1)).exp_()
            sums.append(part.by_pair(products.sum(-1)))
        total = F.embedding_bag(reading.bags, _concatenated(sums), reading.offsets, mode="sum")
        if sinks is not None:
            total = total + (sinks - largest).exp_()
        for part, products, own in zip(reading.parts, scores, reading.of_pairs(total), strict=True):
            products.div_(part.by_block(own, kv_heads).unsqueeze(-1))
            rows = products.to(values.dtype).view(part.blocks * kv_heads, -1, products.shape[-1])
            mixed = torch.bmm(rows, part.of(values).flatten(0, 1))  # [U*K, R*G, W]
            outputs.append(part.by_pair(mixed.view(part.blocks, kv_heads, part.readers, -1)))
        out = F.embedding_bag(reading.bags, _concatenated(outputs), reading.offsets, mode="sum")
        return out.view(*q.shape[:2], values.shape[-1])


@dataclass(frozen=True)
class _Table:
    """Blocks of queries that see about as many, one query behind the other: index tensors of a pass."""

    rows: Tensor
    """[Q*K*n] int64: of blocks [N*K, B, C] those of each query and head, in the order of its tokens."""
    shape: tuple[int, int]
    """The sizes (Q, K)."""
    seen: slice
    """The range of tokens of a query's blocks that some query sees."""
    mask: Tensor | None
    """[Q, 1, 1, S], 0 or -inf, in the type of the keys; None where all queries see all S tokens."""

    def gather(self, pool: Tensor) -> Tensor:
        """[Q, K, S, C] of blocks [N, K, B, C]."""
        block, width = pool.shape[2:]
        return pool.view(-1, block * width).index_select(0, self.rows).view(*self.shape, -1, width)[:, :, self.seen]

    @classmethod
    def of(
        cls, queries: Sequence[Query], firsts: Sequence[int], longest: int, block: int, heads: int, keys: Tensor
    ) -> _Table:
        """Makes the table of queries in order, from the first position that each sees, and the most blocks that one
        sees."""
        table = np.empty((len(queries), longest), dtype=np.int64)
        spans = []
        for row, first, (blocks, position) in zip(table, firsts, queries, strict=True):
            begin, last = first // block, position // block
            row[: last - begin + 1] = blocks[begin : last + 1]
            row[last - begin + 1 :] = blocks[last]  # what fills up must not be NaN
            spans.append((first - begin * block, position + 1 - begin * block))
        rows = table[:, None] * heads + np.arange(heads)[:, None]  # [Q, K, n]
        start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
        mask = None
        if any(span != (start, stop) for span in spans):
            places, of_query = np.arange(start, stop), np.array(spans)
            hidden = (places < of_query[:, :1]) | (places >= of_query[:, 1:])
            scores = torch.from_numpy(np.where(hidden, -np.inf, 0)).to(keys.dtype)
            mask = copy_to(scores[:, None, None], keys.device)
        indices = copy_to(torch.from_numpy(rows.ravel()), keys.device)
        return cls(indices, (len(queries), heads), slice(start, stop), mask)


@dataclass(frozen=True)
class _Part:
    """Blocks with up to R readers each, and pairs of each with R queries, of which some may be nobody's."""

    blocks: int
    readers: int
    chosen: slice | Tensor
    """The part's blocks in the pool, [U] int64 where they are not contiguous."""
    hidden: Tensor
    """[U, 1, R, 1, B] float32: -inf where a reader does not see a token, else 0."""

    def of(self, pool: Tensor) -> Tensor:
        """[U, K, B, C] of all blocks [N, K, B, C]."""
        return pool[self.chosen] if isinstance(self.chosen, slice) else pool.index_select(0, self.chosen)

    def by_block(self, of_pairs: Tensor, kv_heads: int) -> Tensor:
        """[U*R, K*X] -> [U, K, R, X]."""
        return of_pairs.view(self.blocks, self.readers, kv_heads, -1).transpose(1, 2)

    def by_pair(self, of_blocks: Tensor) -> Tensor:
        """[U, K, R, X] -> [U*R, K*X]."""
        return of_blocks.transpose(1, 2).reshape(self.blocks * self.readers, -1)


@dataclass(frozen=True)
class _Reading:
    """The queries that read each block: index tensors of a pass, the same for all layers with one window."""

    parts: tuple[_Part, ...]
    queries: Tensor
    """[P] int64: the query of each pair, part by part."""
    bags: Tensor
    """Pairs, query by query, those of a query in the order of its tokens."""
    offsets: Tensor
    """[Q] int64: where the pairs of each query begin in `bags`."""

    @cached_property
    def _pairs(self) -> list[int]:
        """The number of pairs of each part."""
        return [part.blocks * part.readers for part in self.parts]

    def of_pairs(self, of_queries: Tensor) -> tuple[Tensor, ...]:
        """[Q, X] -> [U*R, X] of each part."""
        return of_queries.index_select(0, self.queries).split(self._pairs)

    @classmethod
    def of(cls, queries: Sequence[Query], window: int | None, block: int, device: torch.device) -> _Reading:
        """Makes the index tensors of queries in order."""
        firsts = [_first_seen(position, window) for _, position in queries]
        tables = [
            blocks[first // block : position // block + 1]
            for first, (blocks, position) in zip(firsts, queries, strict=True)
        ]
        counts = np.array([len(table) for table in tables])
        ends = np.cumsum(counts)
        blocks = np.fromiter(itertools.chain.from_iterable(tables), np.int64, ends[-1])
        cells, shapes = _cells(blocks)
        # Only the first and the last block of a query hold tokens that it does not see.
        places, positions = np.arange(block), np.array([position for _, position in queries])
        hidden = np.zeros((sum(size * readers for size, readers, _ in shapes), block), dtype=np.float32)
        hidden[cells[ends - counts]] = np.where(places < np.array(firsts)[:, None] % block, -np.inf, 0)
        hidden[cells[ends - 1]] += np.where(places > positions[:, None] % block, -np.inf, 0)
        of_pair = np.zeros(len(hidden), dtype=np.int64)
        of_pair[cells] = np.repeat(np.arange(len(tables)), counts)
        parts, start = [], 0
        for size, readers, chosen in shapes:
            own = torch.from_numpy(hidden[start : start + size * readers]).view(size, 1, readers, 1, block)
            where = chosen if isinstance(chosen, slice) else copy_to(torch.from_numpy(chosen), device)
            parts.append(_Part(size, readers, where, copy_to(own, device)))
            start += size * readers
        indices = (copy_to(torch.from_numpy(x), device) for x in (of_pair, cells, ends - counts))
        return cls(tuple(parts), *indices)


def _cells(blocks: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int, slice | np.ndarray]]]:
    """The cell of each pair, from its block [P]: pairs of one part together, and within it the pairs of one block.

    Parts have blocks that are read once, up to twice, up to four times and so on: for each the number of blocks, the
    number of readers, and the blocks.
    """
    low = int(blocks.min())
    counts = np.bincount(blocks - low)
    readers_of = (2 ** np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64))[blocks - low]  # [P]
    cells = np.empty(len(blocks), dtype=np.int64)
    shapes: list[tuple[int, int, slice | np.ndarray]] = []
    start = 0
    for readers in np.unique(readers_of).tolist():
        pairs = np.flatnonzero(readers_of == readers)
        own = blocks[pairs]
        first, stop = int(own.min()), int(own.max()) + 1
        if readers == 1 and len(own) >= LEAST_DENSITY * (stop - first):
            cells[pairs] = start + own - first
            shapes.append((stop - first, 1, slice(first, stop)))
        else:
            chosen, rows, several = np.unique(own, return_inverse=True, return_counts=True)
            order = np.argsort(rows, kind="stable")
            columns = np.empty_like(rows)
            columns[order] = np.arange(len(rows)) - np.repeat(np.cumsum(several) - several, several)
            cells[pairs] = start + rows * readers + columns
            shapes.append((len(chosen), readers, chosen))
        start += shapes[-1][0] * readers
    return cells, shapes


def _first_seen(position: int, window: int | None) -> int:
    """The first position that a query sees."""
    return 0 if window is None else max(0, position - window + 1)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
