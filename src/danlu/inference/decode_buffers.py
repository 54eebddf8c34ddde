"""Contiguous keys and values of growing sequences, kept from one pass to the next.

Blocks have to be gathered before torch's attention kernel can read them, and gathering them again for each token costs
as much as the attention itself. Where the same sequences get one token each, pass after pass, only the new token has to
be added to the gathered ones. The pool keeps everything all the same: these buffers may be dropped at any time.

Q sequences · H query heads · K key/value heads · C head width · W width of a value S tokens that are seen · B tokens of
a block
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.inference.scheduler import Chunk
from danlu.models.block_attention import attention_scores
from danlu.planning.cache_memory import DECODE_BUFFER_BYTES, DECODE_ROOM

if TYPE_CHECKING:
    from danlu.inference.pool import Blocks

# But not where this many times as much would be kept as is seen, because one sequence is longer than the others.
MOST_PADDING = 1.25
# The largest share of rows with an ended sequence: until then they are computed, which costs less than gathering the
# others again. 64 sequences of log-normal lengths are gathered 16 times instead of 54.
ENDED_SHARE = 1 / 8
# With beta 0 the first argument of baddbmm is not read: a product and its scale in one call.
_NOT_READ = torch.zeros(())


class _Layer:
    """The buffers of one layer, [kinds, Q, K, capacity, C], views of them, and the pass that wrote to them last.

    Kinds are keys and values, or one tensor with the values in its first `value_width` features.
    """

    def __init__(self, buffers: Tensor, written: int, value_width: int | None) -> None:
        self.buffers, self.written = buffers, written
        self.keys = buffers[0]  # [Q, K, capacity, C]
        self.values = buffers[1] if value_width is None else self.keys[..., :value_width]
        self.keys_of_heads = self.keys.flatten(0, 1).transpose(1, 2)  # [Q*K, C, capacity]
        self.values_of_heads = self.values.flatten(0, 1)  # [Q*K, capacity, C]


class DecodeBuffers:
    """The buffers of a pool; see `rows_of`."""

    def __init__(self, block: int, device: torch.device) -> None:
        self.block, self._device = block, device
        self._layers: dict[int, _Layer] = {}
        self._storage: dict[int, Tensor] = {}  # by layer, flat; used again by other sequences
        # Of each row its sequence, None for one that has ended, and the position it was brought last. One list, so that
        # an interruption finds both of the same pass.
        self._last: list[tuple[int | None, int]] = []
        self._capacity = 0
        self._pass = 0

    def clear(self) -> None:
        """Gives the memory back."""
        self._layers, self._storage, self._last = {}, {}, []

    def rows_of(self, chunks: Sequence[Chunk], token_bytes: int) -> DecodeRows | None:
        """The rows of a pass that brings one token to each of these sequences; None where they would be too much.

        token_bytes: of all layers.
        """
        longest = max(chunk.stop for chunk in chunks)
        rows = self._continued(chunks) if longest <= self._capacity else None
        if rows is None:
            rows = list(range(len(chunks)))
            capacity = -(-(longest + DECODE_ROOM) // self.block) * self.block
            if len(chunks) * longest > MOST_PADDING * sum(chunk.stop for chunk in chunks):
                return None
            if len(chunks) * capacity * token_bytes > DECODE_BUFFER_BYTES:
                return None
            self._layers, self._capacity = {}, capacity
        self._last = [(None, 0) if row is None else (chunks[row].sequence, chunks[row].start) for row in rows]
        self._pass += 1
        return DecodeRows(self, chunks, rows, self._capacity, self._pass)

    def _continued(self, chunks: Sequence[Chunk]) -> list[int | None] | None:
        """The chunk that continues each row of the buffers, or None where its sequence has ended. None as a whole where
        chunks do not follow on the pass before, or too many rows have ended."""
        rows: list[int | None] = []
        place = 0
        for sequence, last in self._last:
            goes_on = place < len(chunks) and chunks[place].sequence == sequence and chunks[place].start == last + 1
            rows.append(place if goes_on else None)
            place += goes_on
        return rows if place == len(chunks) and len(rows) - place <= ENDED_SHARE * len(rows) else None

    def empty(self, layer: int, shape: tuple[int, ...], like: Blocks) -> Tensor:
        """Returns uninitialised memory for the buffers of a layer, of this shape."""
        size = math.prod(shape)
        storage = self._storage.get(layer)
        if storage is None or storage.numel() < size:
            storage = self._storage[layer] = like.new_empty(size)
        return storage[:size].view(shape)

    def index(self, numbers: np.ndarray) -> Tensor:
        """Numbers on the device."""
        return copy_to(torch.from_numpy(numbers), self._device)


class DecodeRows:
    """One pass over the buffers: index tensors that all layers share."""

    def __init__(
        self,
        buffers: DecodeBuffers,
        chunks: Sequence[Chunk],
        rows: Sequence[int | None],
        capacity: int,
        number: int,
    ) -> None:
        self._buffers, self._capacity, self._number = buffers, capacity, number
        # A row with a sequence that has ended computes what the first one does, and nobody reads it.
        self._chunks = [chunks[row or 0] for row in rows]
        self.tokens = max(chunk.stop for chunk in chunks)  # S
        self._positions = np.array([chunk.start for chunk in self._chunks])
        self._same = int(self._positions.min()) + 1 == self.tokens
        self._masks: dict[torch.dtype, Tensor] = {}
        self._slots: dict[tuple[int, int], Tensor] = {}
        self._tables: dict[int, Tensor] = {}
        self._newest: dict[tuple[int, int], tuple[Tensor, Tensor] | None] = {}  # by heads and ring
        self._full: dict[int, tuple[Tensor, Tensor] | None] = {}  # by heads
        self.of_rows: Tensor | None = None
        """[rows] int64: the sequence that each row of the buffers computes; None where these are the same."""
        self.live: Tensor | None = None
        """[Q] int64: the row of each sequence."""
        if None in rows:
            self.of_rows = buffers.index(np.array([row or 0 for row in rows]))
            self.live = buffers.index(np.array([place for place, row in enumerate(rows) if row is not None]))

    def _mask_in(self, dtype: torch.dtype) -> Tensor | None:
        """The mask [Q, 1, 1, S], 0 or -inf, of the keys that each sequence sees; None where all are equally long."""
        if self._same:
            return None
        if dtype not in self._masks:
            hidden = np.arange(self.tokens) > self._positions[:, None]
            scores = torch.from_numpy(np.where(hidden, -np.inf, 0)[:, None, None]).to(dtype)
            self._masks[dtype] = copy_to(scores, self._buffers._device)
        return self._masks[dtype]

    def attend(
        self,
        layer: int,
        q: Tensor,
        new: tuple[Tensor, ...],
        pool: tuple[Blocks, ...],
        scale: float,
        *,
        value_width: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of a layer's queries [Q, H, C], each over its own sequence: [Q, H, W].

        new: keys and values of the tokens, [Q, K, C] each, or one tensor for both, with values in its first
        `value_width` features; pool: the blocks [N, K, B, C] of those before; sinks: [H].
        """
        stacked = torch.stack(new)
        if self.of_rows is None or self.live is None:
            return self.attend_rows(layer, q, stacked, pool, scale, value_width=value_width, sinks=sinks)
        q, stacked = q.index_select(0, self.of_rows), stacked.index_select(1, self.of_rows)
        out = self.attend_rows(layer, q, stacked, pool, scale, value_width=value_width, sinks=sinks)
        return out.index_select(0, self.live)

    def attend_rows(
        self,
        layer: int,
        q: Tensor,
        new: Tensor,
        pool: tuple[Blocks, ...],
        scale: float,
        *,
        value_width: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`attend` for all rows of the buffers, with keys and values in one tensor, [kinds, rows, K, C].

        The pool need not have the new ones yet.
        """
        own = self._update(layer, new, pool, value_width)
        mask = self._mask_in(q.dtype)
        count, heads, _, width = own.keys.shape
        if sinks is None and (q.dtype != torch.float32 or q.device.type != "cpu"):
            q = q.reshape(count, heads, -1, width)  # [Q, K, G, C]
            keys, values = (x.narrow(2, 0, self.tokens) for x in (own.keys, own.values))
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)
        # Two products are faster than torch's kernel where a key is read by a few queries only: 8 sequences of 128
        # tokens 65 against 129 us, 32 of them 348 against 544 (float32, 4 heads of width 32, two threads).
        keys, values = own.keys_of_heads.narrow(2, 0, self.tokens), own.values_of_heads.narrow(1, 0, self.tokens)
        rows = q.reshape(count * heads, -1, width)  # [Q*K, G, C]
        if sinks is not None:
            scores = attention_scores(rows, keys.transpose(1, 2), scale)  # [Q*K, G, S], float32 or wider
        else:
            scores = torch.baddbmm(_NOT_READ, rows, keys, beta=0, alpha=scale) if scale != 1 else torch.bmm(rows, keys)
        if mask is not None:
            scores.view(count, heads, -1, self.tokens).add_(mask)
        probabilities = scores.softmax(-1)
        if sinks is not None:
            of_sinks = (
                sinks.to(scores.dtype).view(1, heads, -1, 1).expand(count, -1, -1, -1).reshape(-1, rows.shape[1], 1)
            )
            probabilities.mul_(torch.sigmoid(scores.logsumexp(-1, keepdim=True) - of_sinks))
        return torch.bmm(probabilities.to(values.dtype), values).view(count, -1, values.shape[-1])

    def _update(self, layer: int, new: Tensor, pool: tuple[Blocks, ...], value_width: int | None) -> _Layer:
        """The buffers of a layer, with the new tokens [kinds, Q, K, C]."""
        layers = self._buffers._layers
        own = layers.get(layer)
        if own is not None and own.written == self._number:  # the queries are another layer's, which has no keys
            return own
        if own is None or own.written != self._number - 1:  # the pass before did not leave them as they should be
            own = layers[layer] = _Layer(self._gathered(layer, pool), self._number, value_width)
        else:
            self._encode_full(own.buffers, pool)
        own.written = self._number
        if self._same:
            own.buffers.select(3, self.tokens - 1).copy_(new)
        else:
            kinds, _, heads, width = new.shape
            if (kinds, heads) not in self._slots:
                first = np.arange(kinds * len(self._chunks) * heads) * self._capacity
                places = first + np.tile(np.repeat(self._positions, heads), kinds)
                self._slots[kinds, heads] = self._buffers.index(places)
            own.buffers.view(-1, width).index_copy_(0, self._slots[kinds, heads], new.reshape(-1, width))
        return own

    def _gathered(self, layer: int, pool: tuple[Blocks, ...]) -> Tensor:
        """Makes new buffers [kinds, Q, K, capacity, C] with the sequences' entries of the blocks [N, K, B, C]."""
        _, heads, block, width = pool[0].shape
        count = len(self._chunks)
        buffers = self._buffers.empty(layer, (len(pool), count, heads, self._capacity, width), pool[0])
        rows = self._table_of(heads, block)
        stop = len(rows) // (count * heads) * block
        for buffer, blocks in zip(buffers, pool, strict=True):
            if isinstance(blocks, Tensor):
                gathered = blocks.view(-1, block * width).index_select(0, rows)
            else:
                gathered = blocks.of_heads(rows)
            buffer[:, :, :stop] = gathered.view(count, heads, -1, width)
            if not isinstance(blocks, Tensor) and blocks.newest is not None:
                self._add_newest(buffer, blocks.newest)
        if not self._same:  # a short sequence does not see what a long one will have here, but 0 times NaN is NaN
            buffers[:, :, :, stop:] = 0
        return buffers

    def _add_newest(self, buffer: Tensor, newest: Tensor) -> None:
        """Puts the tokens of each sequence's own block into buffers [Q, K, capacity, C] as they are, which a ring
        [slots, R, K, C] has."""
        heads, ring = buffer.shape[1], newest.shape[1]
        if (heads, ring) not in self._newest:
            rows, places = [], []
            for row, chunk in enumerate(self._chunks):
                positions = np.arange(chunk.start // self._buffers.block * self._buffers.block, chunk.start)
                rows.append(chunk.slot * ring + positions % ring)
                places.append(self._places(row, heads, positions).T)
            self._newest[heads, ring] = self._pair(rows, places)
        if (pair := self._newest[heads, ring]) is not None:
            entries = newest.flatten(0, 1).index_select(0, pair[0])  # [tokens, K, C]
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, pair[1], entries.flatten(0, 1))

    def _encode_full(self, buffers: Tensor, pool: tuple[Blocks, ...]) -> None:
        """Replaces tokens in buffers [kinds, Q, K, capacity, C] that are as they are by decoded ones, where the pass
        before has filled their block."""
        heads, block = buffers.shape[2], self._buffers.block
        for buffer, blocks in zip(buffers, pool, strict=True):
            if isinstance(blocks, Tensor) or blocks.newest is None:
                continue
            if heads not in self._full:
                rows, places = [], []
                for row, chunk in enumerate(self._chunks):
                    if chunk.start % block == 0 and chunk.start > 0:
                        rows.append(chunk.blocks[chunk.start // block - 1] * heads + np.arange(heads))
                        places.append(self._places(row, heads, np.arange(chunk.start - block, chunk.start)))
                self._full[heads] = self._pair(rows, places)
            if (pair := self._full[heads]) is not None:
                width = buffer.shape[-1]
                buffer.view(-1, width).index_copy_(0, pair[1], blocks.of_heads(pair[0]).view(-1, width))

    def _places(self, row: int, heads: int, positions: np.ndarray) -> np.ndarray:
        """The places [K, positions] in buffers [Q * K * capacity, C] of a row's tokens."""
        return ((row * heads + np.arange(heads)) * self._capacity)[:, None] + positions

    def _pair(self, rows: list[np.ndarray], places: list[np.ndarray]) -> tuple[Tensor, Tensor] | None:
        if not any(each.size for each in rows):
            return None
        first, second = (np.concatenate([each.ravel() for each in several]) for several in (rows, places))
        return self._buffers.index(first.astype(np.int64)), self._buffers.index(second.astype(np.int64))

    def _table_of(self, heads: int, block: int) -> Tensor:
        """[Q*K*n] int64: of blocks [N*K, B*C] those of each sequence and head, n of each, the last one repeated."""
        if heads not in self._tables:
            most = -(-self.tokens // block)
            table = np.empty((len(self._chunks), most), dtype=np.int64)
            for row, chunk in zip(table, self._chunks, strict=True):
                count = -(-chunk.stop // block)
                row[:count] = chunk.blocks[:count]
                row[count:] = chunk.blocks[count - 1]
            rows = table[:, None] * heads + np.arange(heads)[:, None]  # [Q, K, n]
            self._tables[heads] = self._buffers.index(rows.ravel())
        return self._tables[heads]
