"""Attention with the same bits in every row, in training, in a prompt's chunk and in decoding.

Keys are taken in blocks of `KEY_BLOCK` by their position in the sequence, wherever they lie in a pack or a cache;
queries in tiles of as many rows each time, the last one filled up. So each product has one shape, whatever it is part
of. The results of the blocks are merged from the first to the last by an online softmax in float32, as in flash
attention (arXiv:1805.02867, arXiv:2205.14135). A block that a query does not see at all changes no bit of its row, so
it does not matter which of them a tile goes through for the sake of its other rows.

T queries · S rows of keys and values · H query heads · K key/value heads · G = H / K queries a key/value head serves
C head width · W width of values · P tiles · B query tokens of a tile, R = B G its rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.models.segments import Range

KEY_BLOCK = 64
QUERY_ROWS = 32
"""R, or the most below it that G divides. Fewer are more copies of keys in training, more are zeros in decoding."""


class Attended(NamedTuple):
    """Attention of rows over some keys, in float32 or wider."""

    out: Tensor  # [.., R, W]: values, averaged by softmax; zeros for a row that sees none of these keys
    lse: Tensor  # [.., R]: log of the sum of exp(score); -inf for such a row


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float, softcap: float | None = None
) -> Attended:
    """Attention of each tile over one block of keys.

    Args:
        q: [P, K, R, C], float32 or wider like all.
        k: [P, K, KEY_BLOCK, C]; v: [P, K, KEY_BLOCK, W]. Rows that are no keys must be finite.
        visible: [P, R, KEY_BLOCK] bool, True where a row sees a key.
        scale: of scores; softcap: scores become softcap x tanh(score / softcap).

    Returns [P, K, R, W] and [P, K, R].
    """
    tiles, heads = q.shape[:2]
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).mul_(scale)  # [P*K, R, block]
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.view(tiles, heads, *scores.shape[1:]).masked_fill_(~visible.unsqueeze(1), float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    base = highest.masked_fill(highest.isneginf(), 0)
    weights = scores.sub_(base).exp_()
    mass = weights.sum(-1, keepdim=True)  # at least 1 if the row sees a key: that of its largest score
    out = torch.bmm(weights, v.flatten(0, 1)).div_(mass.clamp_min(1))
    lse = base.add_(mass.log_())
    return Attended(out.unflatten(0, (tiles, heads)), lse.squeeze(-1).unflatten(0, (tiles, heads)))


def merge(first: Attended, second: Attended) -> Attended:
    """Attention over the keys of both. A row that sees none of the second's keys keeps the first's bits."""
    highest = torch.maximum(first.lse, second.lse)
    base = highest.masked_fill(highest.isneginf(), 0)
    weights = [(part.lse - base).exp_() for part in (first, second)]  # [.., R]
    mass = weights[0] + weights[1]  # at least 1 if the row sees a key
    shares = [weight.div_(mass.clamp_min(1)).unsqueeze(-1) for weight in weights]
    return Attended(first.out * shares[0] + second.out * shares[1], base.add_(mass.log_()))


def with_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """Adds one more key to attention, with a score of sinks [.., R] and a value of zero: out times sigmoid(lse - sink).

    Each row sees a key.
    """
    # No torch.sigmoid, and logaddexp written out: see `merge` for operations that do not ask where a number stands.
    more = (sinks - attended.lse).exp_().add_(1)
    return Attended(attended.out / more.unsqueeze(-1), attended.lse + more.log_())


def by_head_in_tiles(x: Tensor, matrices: Tensor) -> Tensor:
    """x [T, H, I] times matrices [H, I, O] -> [T, H, O], in tiles of `QUERY_ROWS` tokens, the last one filled up."""
    tokens = x.shape[0]
    tiles = F.pad(x.transpose(0, 1), (0, 0, 0, -tokens % QUERY_ROWS)).split(QUERY_ROWS, dim=1)  # [H, QUERY_ROWS, I]
    products = [torch.bmm(tile.contiguous(), matrices) for tile in tiles]
    return torch.cat(products, dim=1)[:, :tokens].transpose(0, 1)


@dataclass(frozen=True)
class QueryRun:
    """Queries that follow one another in a sequence, and where the sequence's keys are."""

    count: int
    position: int
    """The position of the first query in its sequence."""
    keys: tuple[Range, ...]
    """Rows of k and v with the tokens from the sequence's first to the last of these queries, in order."""


class BlockwiseQueries:
    """All queries of a forward pass, laid end to end in runs, and the blocks of keys that each goes through.

    Index tensors are built once and serve all layers that are alike.
    """

    def __init__(self, runs: Sequence[QueryRun], device: torch.device) -> None:
        self.runs = tuple(runs)
        self.device = device
        self._first_block: list[int] = []  # of each run, among all blocks of keys
        rows: list[np.ndarray] = []
        blocks = 0
        for run in self.runs:
            self._first_block.append(blocks)
            own = [np.arange(start, stop) for start, stop in run.keys]
            length = sum(map(len, own))
            assert length == run.position + run.count, "a run's last query stands at its last key"
            # Filled up with what comes after all queries, and is as finite as they are.
            rows += [*own, np.full(-length % KEY_BLOCK, run.keys[0][0])]
            blocks += -(-length // KEY_BLOCK)
        self._key_rows = self._on_device(np.concatenate(rows) if rows else [])  # [blocks * KEY_BLOCK]
        self._tiles: dict[tuple[int, int | None], _Tiles] = {}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, C], k [S, K, C], v [S, K, W], sinks [H] -> [T, H, W] in q's dtype."""
        wide = torch.promote_types(q.dtype, torch.float32)
        heads, kv_heads = q.shape[1], k.shape[1]
        groups = heads // kv_heads
        tiles = self._tiles_of(groups, window)
        keys, values = (self._in_blocks(x, wide) for x in (k, v))  # [blocks, K, KEY_BLOCK, C or W]
        queries = q[tiles.queries].to(wide).view(tiles.count, tiles.tokens, kv_heads, groups, -1)
        queries = queries.transpose(1, 2).reshape(tiles.count, kv_heads, tiles.tokens * groups, -1)  # [P, K, R, C]
        shape = queries.shape[:3]
        total = Attended(
            queries.new_zeros(*shape, v.shape[2]), queries.new_full(shape, float("-inf"))
        )  # of which the first tiles have the most blocks
        for step in tiles.steps:
            part = Attended(total.out[: step.tiles], total.lse[: step.tiles])
            visible = tiles.visible(step).repeat_interleave(groups, dim=1)  # [P, R, KEY_BLOCK]
            block = attend_block(
                queries[: step.tiles], keys[step.blocks], values[step.blocks], visible, scale=scale, softcap=softcap
            )
            for old, new in zip(part, merge(part, block), strict=True):
                old.copy_(new)
        if sinks is not None:
            # As rows [P, K, B, G]: a tile's are its tokens, with the queries of a key/value head for each.
            of_rows = sinks.to(wide).view(1, kv_heads, 1, groups).expand(-1, -1, tiles.tokens, -1).flatten(2)
            total = with_sinks(total, of_rows)
        out = total.out.view(tiles.count, kv_heads, tiles.tokens, groups, -1).transpose(1, 2)  # [P, B, K, G, W]
        return out.reshape(tiles.count * tiles.tokens, heads, -1)[tiles.slots].to(q.dtype)

    def _in_blocks(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [S, K, C] as blocks of keys [blocks, K, KEY_BLOCK, C]."""
        return x[self._key_rows].to(dtype).unflatten(0, (-1, KEY_BLOCK)).transpose(1, 2).contiguous()

    def _tiles_of(self, groups: int, window: int | None) -> _Tiles:
        key = groups, window
        if key not in self._tiles:
            self._tiles[key] = self._make_tiles(max(1, QUERY_ROWS // groups), window)
        return self._tiles[key]

    def _make_tiles(self, tokens: int, window: int | None) -> _Tiles:
        """Makes tiles of at most `tokens` query tokens, those with the most blocks first."""
        tiles: list[_Tile] = []
        first_query = 0
        for run, first_block in zip(self.runs, self._first_block, strict=True):
            for start in range(0, run.count, tokens):
                count = min(tokens, run.count - start)
                position = run.position + start
                oldest = 0 if window is None else max(0, position - window + 1)
                blocks = range(oldest // KEY_BLOCK, (position + count - 1) // KEY_BLOCK + 1)
                tiles.append(_Tile(first_query + start, count, position, blocks, first_block))
            first_query += run.count
        tiles.sort(key=lambda tile: -len(tile.blocks))
        queries, positions, slots = [], [], [0] * first_query
        for number, tile in enumerate(tiles):
            for place in range(tokens):
                real = place < tile.count
                queries.append(tile.first_query + place if real else tile.first_query)
                positions.append(tile.position + place if real else tile.position)
                if real:
                    slots[tile.first_query + place] = number * tokens + place
        steps = []
        for index in range(len(tiles[0].blocks) if tiles else 0):
            going_on = [tile for tile in tiles if index < len(tile.blocks)]
            among_all = self._on_device([tile.first_block + tile.blocks[index] for tile in going_on])
            first_keys = self._on_device([KEY_BLOCK * tile.blocks[index] for tile in going_on])
            steps.append(_Step(len(going_on), among_all, first_keys))
        return _Tiles(
            len(tiles),
            tokens,
            window,
            self._on_device(queries),
            self._on_device(positions).view(len(tiles), tokens),
            self._on_device(slots),
            tuple(steps),
        )

    def _on_device(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        return copy_to(torch.from_numpy(np.asarray(numbers, dtype=np.int64)), self.device)


@dataclass(frozen=True)
class _Tile:
    """Queries of one run that are attended together."""

    first_query: int
    count: int
    position: int  # of the first one in its sequence
    blocks: range  # of its sequence that one of them sees
    first_block: int  # of the sequence, among all


@dataclass(frozen=True)
class _Step:
    """The next block of every tile that has one."""

    tiles: int  # the first so many
    blocks: Tensor  # [tiles] int64, among all
    positions: Tensor  # [tiles] int64, of its first key in the sequence


@dataclass(frozen=True)
class _Tiles:
    count: int  # P
    tokens: int  # B
    window: int | None
    queries: Tensor  # [P * B] int64: row of q; of what fills a tile up that of its first query
    positions: Tensor  # [P, B] int64 in the sequence
    slots: Tensor  # [T] int64: where in P * B a query is
    steps: tuple[_Step, ...]

    def visible(self, step: _Step) -> Tensor:
        """[step's tiles, B, KEY_BLOCK] bool: True where a query sees a key of its next block."""
        offsets = torch.arange(KEY_BLOCK, device=step.positions.device)
        keys = (step.positions.unsqueeze(1) + offsets).unsqueeze(1)  # [tiles, 1, KEY_BLOCK]
        queries = self.positions[: step.tiles].unsqueeze(2)  # [tiles, B, 1]
        seen = keys <= queries
        return seen if self.window is None else seen & (keys > queries - self.window)
