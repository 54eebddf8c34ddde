"""Faults that context parallelism is known for: states that are lost, or restart, where a document is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from danlu.core.types import Batch, Run, Share
from danlu.data import context_sharding
from danlu.models import tiled_attention
from danlu.models.blockwise import Attended
from danlu.models.tiled_attention import Tile
from danlu.parallel import ring_attention
from danlu.parallel.context_groups import ContextGroups
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.verification.fault import Fault, replaced
from danlu.verification.proxy import Proxy


def _changed(change: Callable[[Batch, Share], Batch]) -> AbstractContextManager[None]:
    """Changes each context rank's share of a batch."""

    original = context_sharding.share_of_batch

    def share_of_batch(
        batch: Batch, shares: Sequence[Share], index: int, all_reduce: Callable[[Tensor], Tensor]
    ) -> Batch:
        return change(original(batch, shares, index, all_reduce), shares[index])

    return replaced(context_sharding, "share_of_batch", share_of_batch)


def _positions_begin_anew(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each chunk is rotated as if a document began with it."""

    def change(batch: Batch, share: Share) -> Batch:
        return replace(batch, positions=torch.cat([torch.arange(0), *(torch.arange(run.tokens) for run in share.runs)]))

    return _changed(change)


def _target_lost_at_cut(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The last token of a chunk predicts nothing, as where targets are made by each rank from its own tokens."""

    def change(batch: Batch, share: Share) -> Batch:
        last = torch.tensor(batch.boundaries[1:]) - 1  # of each run
        kept = ~torch.isin(batch.logits_indices, last)
        weights = batch.weights[kept]
        return replace(
            batch,
            logits_indices=batch.logits_indices[kept],
            targets=batch.targets[kept],
            weights=weights,
            weight=float(weights.double().sum()),
        )

    return _changed(change)


def _branch_sums_per_rank(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """A rank's part of a branch counts as all of it."""

    def change(batch: Batch, share: Share) -> Batch:
        shared = batch.shared_branches
        assert shared is not None, "it is the share of a context rank"
        return replace(batch, shared_branches=replace(shared, all_reduce=lambda x: x))

    return _changed(change)


def _document_lengths_lost(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The length that a document is rotated by is read from the part of it that a rank has."""
    return _changed(lambda batch, share: replace(batch, document_lengths=None))


def _document_leak(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Chunks of all documents are attended as if they were of one."""
    as_rows = ring_attention.as_rows

    def of_one_document(runs: Sequence[Run]) -> tuple[Run, ...]:
        return tuple(run._replace(document=0, position=run.start) for run in as_rows(runs))

    return replaced(ring_attention, "as_rows", of_one_document)


def _window_at_border(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """A window lacks one key of other ranks."""

    def tiles_between(queries: Sequence[Run], keys: Sequence[Run], window: int | None) -> tuple[Tile, ...]:
        narrower = window if window is None or list(queries) == list(keys) else window - 1
        return tiled_attention.tiles_between(queries, keys, narrower)

    return replaced(ring_attention, "tiles_between", tiles_between)


def _sink_on_each_rank(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Sinks are one more key of the queries wherever keys come from: as many in all as the ring has ranks."""

    def finished(total: Attended, sinks: Tensor | None) -> Attended:
        of_all = None if sinks is None else sinks + math.log(ranks.ring.size)  # so many keys of one score
        return tiled_attention.finished(total, of_all)

    return replaced(ring_attention, "finished", finished)


def _balance_of_one_share(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The load balance of a document counts the tokens of one context rank alone."""
    return replaced(ContextGroups, "sum", lambda groups, x: x)


def _balances_documents(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    balances = recipe.router is not None and recipe.router.balance in ("bias", "sequence") and recipe.router.sequence
    return layout.context > 1 and proxy.has_experts and bool(balances)


def _is_cut(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.context > 1


def _compares_cut_branches(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.context > 1 and recipe.row_type is not None


def _rotates_by_length(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    ropes = (getattr(kind.mixer, "rope", None) for kind in proxy.layer_kinds)
    return layout.context > 1 and any(rope is not None and rope.follows_length for rope in ropes)


def _has_ring(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.context > layout.ulysses


def _has_ring_with_windows(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    windows = (getattr(kind.mixer, "window", None) for kind in proxy.layer_kinds)
    return _has_ring(recipe, layout, proxy) and any(window is not None for window in windows)


def _has_ring_with_sinks(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    has_sinks = any(getattr(kind.mixer, "sinks", False) for kind in proxy.layer_kinds)
    return _has_ring(recipe, layout, proxy) and recipe.parallel.context.method == "ring" and has_sinks


FAULTS: dict[str, Fault] = {
    "balance-of-one-share": Fault(_balances_documents, _balance_of_one_share),
    "branch-sums-per-rank": Fault(_compares_cut_branches, _branch_sums_per_rank),
    "document-leak": Fault(_has_ring, _document_leak),
    "document-lengths-lost": Fault(_rotates_by_length, _document_lengths_lost),
    "positions-begin-anew": Fault(_is_cut, _positions_begin_anew),
    "sink-on-each-rank": Fault(_has_ring_with_sinks, _sink_on_each_rank),
    "target-lost-at-cut": Fault(_is_cut, _target_lost_at_cut),
    "window-at-border": Fault(_has_ring_with_windows, _window_at_border),
}
"""The faults by name, sorted."""
