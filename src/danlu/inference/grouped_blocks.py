"""Cached entries of tokens in 4 bits, `rollout.cache: int4`: keys by channel, values by token (KIVI, arXiv:2402.02750).

A channel's scale is that of the tokens of a block, so a block is encoded when its last token is written. Until then a
sequence has its newest tokens as they are, in a slot of its own: a ring in which position p is at p modulo R. So a
query sees its own block as it is and the blocks before it in 4 bits: what it sees follows from the tokens before it
alone, whatever the chunks of its text are. The ring has room for as many proposed tokens as may be given up again; a
block that these fill is encoded again when other tokens fill it.

N blocks · B tokens of a block · T tokens of a pass · H tokens before chunks, in the blocks where these begin
R tokens of a ring · C width of an entry · Gt, Gc groups of a block along tokens and along channels
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.inference.scheduler import Chunk
from danlu.numerics.format import Format, Scaled, encode
from danlu.planning.cache_memory import group_of

SCALE_DTYPE, ZERO_DTYPE = torch.bfloat16, torch.int16


@dataclass(frozen=True)
class GroupedBlocks:
    """The blocks of a layer's entries of one shape in 4 bits, in place of a tensor [N, *lead, B, C]."""

    codes: Tensor
    """[N, *lead, B, C / 2] uint8: two codes a byte, the one of the even channel in the lower bits."""
    scales: Tensor
    """[N, *lead, Gt, Gc] bfloat16."""
    zeros: Tensor
    """[N, *lead, Gt, Gc] int16: steps."""
    newest: Tensor
    """[slots, R, *lead, C]: the newest tokens of sequences as they are, in the type of activations."""
    number: int
    """The number of the tensor in its layer, by which groups lie along tokens or along channels."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.newest.shape[-1]))

    @property
    def _format(self) -> Format:
        return _format_of(self.number)

    def new_empty(self, size: int) -> Tensor:
        """Returns uninitialised memory for so many decoded numbers."""
        return self.newest.new_empty(size)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns some blocks decoded, [U, *lead, B, C]; dim is 0."""
        assert dim == 0, "blocks are along the first dimension"
        return self._decoded(*(x.index_select(0, index) for x in (self.codes, self.scales, self.zeros)))

    def of_heads(self, rows: Tensor) -> Tensor:
        """Returns blocks of single heads decoded, [rows, B * C], by their numbers among [N * heads]."""
        parts = (x.flatten(0, -3).index_select(0, rows) for x in (self.codes, self.scales, self.zeros))
        return self._decoded(*parts).flatten(1)

    def encode_into(self, blocks: Tensor, entries: Tensor) -> None:
        """Encodes all tokens of blocks [U] int64, entries [U, *lead, B, C]."""
        encoded = encode(entries, self._format)
        assert encoded.zeros is not None, "the format has zeros"
        parts = (self.codes, _packed(encoded.codes)), (self.scales, encoded.scales), (self.zeros, encoded.zeros)
        for stored, new in parts:
            stored.index_copy_(0, blocks, new)

    def _decoded(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., : self.newest.shape[-1]]
        return Scaled(both, scales, self._format, zeros).decode(self.newest.dtype)


@cache
def _format_of(number: int) -> Format:
    return Format("int4", group_of(number), "bfloat16", "offset")


def _packed(codes: Tensor) -> Tensor:
    """Packs codes [.., C] below 16 into bytes [.., C / 2], rounded up."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return even | (odd << 4)


class NewestTokens:
    """The newest tokens in a plan's chunks: index tensors of a pass, which all layers share.

    A layer's entries of a pass are at hand as [H + T]: of each chunk the tokens before it in the block where it begins,
    out of the ring of its sequence, and behind those of all chunks the new ones.
    """

    def __init__(self, chunks: Sequence[Chunk], block: int, ring: int, device: torch.device) -> None:
        self._block, self._device = block, device
        self._chunks = chunks
        begins = [chunk.start // block * block for chunk in chunks]
        earlier = [chunk.start - begin for chunk, begin in zip(chunks, begins, strict=True)]
        new = [chunk.stop - chunk.start for chunk in chunks]
        self._first_earlier = list(itertools.accumulate(earlier, initial=0))
        count = self._first_earlier[-1]
        self._first_new = list(itertools.accumulate(new, initial=count))
        rings, kept, full, full_rows = [], [], [], []
        for number, (chunk, begin) in enumerate(zip(chunks, begins, strict=True)):
            rings.append(chunk.slot * ring + np.arange(begin, chunk.start) % ring)
            oldest = max(chunk.start, chunk.stop - ring)
            places = chunk.slot * ring + np.arange(oldest, chunk.stop) % ring
            kept.append((places, self.rows(number, oldest, chunk.stop)))
            for place in range(begin // block, chunk.stop // block):
                full.append(chunk.blocks[place])
                full_rows.append(self.rows(number, place * block, (place + 1) * block))
        self._earlier = self._index(np.concatenate(rings)) if count else None
        self._kept = tuple(self._index(np.concatenate(each)) for each in zip(*kept, strict=True)) if kept else None
        self._full = (self._index(np.array(full)), self._index(np.concatenate(full_rows))) if full else None
        self._entries: dict[int, tuple[Tensor, ...]] = {}  # by layer

    def rows(self, number: int, start: int, stop: int) -> np.ndarray:
        """The places among [H + T] of the tokens from position `start` to `stop` of a chunk, by its number."""
        positions, first = np.arange(start, stop), self._chunks[number].start
        of_earlier = self._first_earlier[number] + positions - first // self._block * self._block
        return np.where(positions < first, of_earlier, self._first_new[number] + positions - first)

    def block_rows(self, number: int, place: int) -> np.ndarray:
        """The places [B] among [H + T] of the tokens of a chunk's block at `place`; those behind the chunk's last token
        are that token."""
        stop = min(self._chunks[number].stop, (place + 1) * self._block)
        rows = self.rows(number, place * self._block, stop)
        return np.pad(rows, (0, self._block - len(rows)), mode="edge")

    def entries(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's entries of the pass as they are, [H + T, *lead, C] each, once they are written."""
        return self._entries[layer]

    def write(self, layer: int, blocks: Sequence[GroupedBlocks], rows: Sequence[Tensor]) -> None:
        """Keeps a layer's entries of the pass, [T, *lead, C] each, and encodes the blocks that they fill."""
        self._entries[layer] = tuple(self._written(*each) for each in zip(blocks, rows, strict=True))

    def _written(self, blocks: GroupedBlocks, new: Tensor) -> Tensor:
        ring = blocks.newest.flatten(0, 1)
        # Before the ring is written to: a long chunk overwrites it.
        entries = new if self._earlier is None else torch.cat((ring.index_select(0, self._earlier), new))
        if self._full is not None:
            numbers, places = self._full
            of_blocks = entries.index_select(0, places).unflatten(0, (-1, self._block))  # [U, B, *lead, C]
            blocks.encode_into(numbers, of_blocks.movedim(1, -2).contiguous())
        if self._kept is not None:
            ring.index_copy_(0, self._kept[0], entries.index_select(0, self._kept[1]))
        return entries

    def _index(self, numbers: np.ndarray) -> Tensor:
        return copy_to(torch.from_numpy(numbers.astype(np.int64)), self._device)
