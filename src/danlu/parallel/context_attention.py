"""Attention over packed documents that are cut over context ranks: by a ring, by gathered keys, or by heads (Ulysses).

Each rank has a share of a pack's tokens (`data.context_sharding`): whole documents, of which nothing travels, and
chunks of long ones. Of these the queries stay and keys come: around a ring while each rank computes with those it has
(`parallel.ring_attention`), or gathered from all at once. Ulysses (arXiv:2309.14509) exchanges tokens for heads: each
rank of a group has all their tokens, and a part of the heads, in attention. With both, neighbours exchange heads, and
keys of these heads go around the ring of those that have the same ones (arXiv:2405.07719).

T tokens of this rank · S tokens of all ranks of an Ulysses group · H query heads · K key/value heads · C head width
W width of a value · U ranks of an Ulysses group
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.errors import ModelError
from danlu.core.layer_types import Keys
from danlu.core.types import Branch, Run, Share
from danlu.models.attend import PackedAttention
from danlu.models.attention_kernels import Kernels
from danlu.models.recurrent_order import RecurrentOrder, RecurrentPart, RecurrentRuns
from danlu.models.tiled_attention import TiledAttention, TilePlan, TileSettings, plan_tiles, tile_kernel_for
from danlu.parallel.context_exchange import dealt_heads, heads_of_all, rows_of_others, tokens_of_all
from danlu.parallel.context_groups import ContextGroups
from danlu.parallel.context_recurrence import UlyssesHeads
from danlu.parallel.ring_attention import RankRows, ring_attention


class ContextAttention:
    """Causal attention of this rank's tokens over their documents, wherever these lie.

    It is a `danlu.core.layer_types.Attend`. Rows are those of the share of this rank, in its order.

    Args:
        shares: the shares of all context ranks, of the same pack.
        groups: the context groups of this process.
        filler: rows behind the share, which fill a batch up: a document of their own.
        sends_expanded: whether keys and values travel instead of the values from which they are computed. This is
            needed where computing them takes more than those values, their positions and parameters, as with dropout.
        kernels: the kernels that may be used for documents that are cut; by default all that the device has.
        recomputed_layers: as `PackedAttention` has it, for documents that are whole; tiles keep no probabilities.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        groups: ContextGroups,
        *,
        filler: int = 0,
        sends_expanded: bool = False,
        kernels: Kernels | None = None,
        recomputed_layers: Container[int] = (),
    ) -> None:
        assert len(shares) == groups.size, f"{len(shares)} shares for {groups.size} context ranks"
        self._filler = PackedAttention((0, filler)) if filler else None
        self._share_tokens, self._sends_expanded = shares[groups.index].tokens, sends_expanded
        own = shares[groups.index]
        self.groups = groups
        self._whole = _attention_of(own.whole, recomputed_layers) if own.whole else None
        self._whole_tokens = sum(run.tokens for run in own.whole)
        chunks = [share.chunks for share in shares]
        self._chunks = _ChunkAttention(chunks, groups, kernels, recomputed_layers) if any(chunks) else None

    @cached_property
    def runs(self) -> RecurrentRuns:
        """Raises ModelError unless all context ranks exchange heads."""
        parts = []
        if self._whole is not None:
            parts.append(RecurrentPart(slice(0, self._whole_tokens), self._whole.runs.order))
        if self._chunks is not None:
            parts.append(RecurrentPart(slice(self._whole_tokens, self._share_tokens), self._chunks.exchanged_heads()))
        if self._filler is not None:
            parts.append(RecurrentPart(slice(self._share_tokens, None), self._filler.runs.order))
        return RecurrentRuns(RecurrentOrder(()), parts=parts)

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
        k, v = keys.expanded()
        parts: list[Tensor] = []
        settings = TileSettings(scale, window, softcap)
        whole, cut = slice(0, self._whole_tokens), slice(self._whole_tokens, self._share_tokens)
        if self._whole is not None:
            own = Keys((k[whole], v[whole]))
            parts.append(self._whole(layer, q[whole], own, **vars(settings), sinks=sinks))
        if self._chunks is not None:
            stored = Keys((k, v)) if self._sends_expanded else keys
            own = Keys(tuple(x[cut] for x in stored.stored), stored.expand)
            parts.append(self._chunks(layer, q[cut], k[cut], v[cut], own, settings, sinks))
        if self._filler is not None:
            filler = slice(self._share_tokens, None)
            own = Keys((k[filler], v[filler]))
            parts.append(self._filler(layer, q[filler], own, **vars(settings), sinks=sinks))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _ChunkAttention:
    """Attention over documents of which each rank has chunks, or none. Every rank takes part in each exchange."""

    def __init__(
        self,
        chunks: Sequence[Sequence[Run]],
        groups: ContextGroups,
        kernels: Kernels | None,
        recomputed_layers: Container[int],
    ) -> None:
        """chunks: of each context rank. kernels, recomputed_layers: as of `ContextAttention`."""
        self.groups, self.kernels = groups, kernels
        ulysses = groups.ulysses.size
        by_group = [chunks[first : first + ulysses] for first in range(0, len(chunks), ulysses)]
        self.rows = RankRows(groups.ring, [list(itertools.chain.from_iterable(members)) for members in by_group])
        self.counts = [sum(run.tokens for run in own) for own in by_group[groups.ring.index]]
        """Rows of each rank of the Ulysses group."""
        self._in_order = _RowsInOrder(self.rows.runs[0], recomputed_layers) if groups.ring.alone else None
        self._gathered_plans: dict[tuple[Any, ...], TilePlan] = {}  # see `_plan`

    def exchanged_heads(self) -> UlyssesHeads:
        """Returns the exchange for layers with a state. Raises ModelError where a ring has parts of the documents."""
        if self._in_order is None:
            raise ModelError(
                "linear attention goes through a document in order, and a ring of context ranks has its tokens all at "
                "once. Use parallel: {context: {size: N, method: ulysses}}"
            )
        in_order = self._in_order
        return UlyssesHeads(self.groups.ulysses, self.counts, in_order.order, in_order.attend.runs.order)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, keys: Keys, settings: TileSettings, sinks: Tensor | None
    ) -> Tensor:
        """q [T, H, C], k [T, K, C], v [T, K, W] and sinks [H] of all heads -> [T, H, W]."""
        group = self.groups.ulysses
        if group.alone:
            return self._of_heads(layer, q, k, v, keys, settings, sinks)
        q, k, v = (heads_of_all(x, group, self.counts) for x in (q, *dealt_heads(k, v, group.size)))
        own = None if sinks is None else sinks.chunk(group.size)[group.index]
        return tokens_of_all(self._of_heads(layer, q, k, v, Keys((k, v)), settings, own), group, self.counts)

    def _of_heads(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, keys: Keys, settings: TileSettings, sinks: Tensor | None
    ) -> Tensor:
        """Computes the attention of all tokens of an Ulysses group, with the heads that this rank has of them."""
        if self._in_order is not None:
            return self._in_order(layer, q, k, v, settings, sinks)
        if self.groups.transport == "ring":
            return ring_attention(q, k, v, keys, sinks, self.rows, settings, self.kernels)
        out: Tensor = TiledAttention.apply(q, *self._gathered(k, v, keys), sinks, self._plan(q, v, settings), settings)
        return out

    def _gathered(self, k: Tensor, v: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Keys [S, K, C] and values [S, K, W]: this rank's own, then those of all others."""
        rows = self.rows
        others = [rows_of_others(x, rows.group, rows.counts) for x in keys.stored]
        if keys.expand is not None:
            sources = [source for source in range(rows.group.size) if source != rows.group.index]
            others = list(keys.expand(others, torch.cat([rows.positions(source, k.device) for source in sources])))
        return torch.cat((k, others[0])), torch.cat((v, others[1]))

    def _plan(self, q: Tensor, v: Tensor, settings: TileSettings) -> TilePlan:
        """Returns the plan that computes the tiles of this rank's queries and the keys of `_gathered`."""
        window, kernel = settings.window, tile_kernel_for(q, v, settings.softcap, self.kernels)
        key = window, kernel, q.dtype
        if key not in self._gathered_plans:
            own = self.rows.group.index
            tiles, first = list(self.rows.tiles(own, window)), self.rows.counts[own]
            for source in (source for source in range(self.rows.group.size) if source != own):
                tiles += [tile.with_keys_from(first) for tile in self.rows.tiles(source, window)]
                first += self.rows.counts[source]
            self._gathered_plans[key] = plan_tiles(tiles, window, kernel, q.dtype)
        return self._gathered_plans[key]


class _RowsInOrder:
    """Attention over whole documents with tokens that lie in chunks: they are put in order and attended as any
    pack is.
    """

    def __init__(self, runs: Sequence[Run], recomputed_layers: Container[int]) -> None:
        """runs: rows, of which all documents are whole."""
        in_order = sorted(runs)
        self.attend = _attention_of(in_order, recomputed_layers)
        self.order = torch.cat([torch.arange(run.start, run.stop) for run in in_order])  # [S] int64

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: TileSettings, sinks: Tensor | None
    ) -> Tensor:
        """q [S, H, C], k [S, K, C], v [S, K, W] -> [S, H, W], in the order of the rows."""
        if self.order.device != q.device:
            self.order = copy_to(self.order, q.device)
        q, k, v = (x.index_select(0, self.order) for x in (q, k, v))
        out = self.attend(
            layer, q, Keys((k, v)), scale=settings.scale, window=settings.window, softcap=settings.softcap, sinks=sinks
        )
        return out.index_select(0, self.order.argsort())


def _attention_of(runs: Sequence[Run], recomputed_layers: Container[int]) -> PackedAttention:
    """Builds attention over whole documents, or trees; their tokens are those of `runs`, one run after the other."""
    branches: list[Branch] = []
    numbers: dict[int, int] = {}  # of `Run.document`, among `branches`
    row = 0
    for document, parts in itertools.groupby(runs, lambda run: run.document):
        own = list(parts)
        ancestors, stop = own[0].ancestors, row + sum(run.tokens for run in own)
        numbers[document] = len(branches)
        branches.append(Branch(numbers[ancestors[-1]] if ancestors else -1, row, stop))
        row = stop
    boundaries = (*(branch.start for branch in branches if branch.parent < 0), row)
    return PackedAttention(boundaries, tuple(branches), recomputed_layers=recomputed_layers)
