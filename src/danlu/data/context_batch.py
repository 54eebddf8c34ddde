"""The part of a micro-batch that one context rank has: cut after it was collated, so targets and positions are those of
whole documents, and no target is lost between two chunks.

T packed tokens · N trained targets · t tokens and n targets of one rank · M branches
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.types import Batch, Share, SharedBranches, TargetSources


def rows_of(share: Share) -> Tensor:
    """[t] int64: the tokens of a share, in its order, as offsets into T."""
    return torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop) for run in share.runs)])


def share_of_batch(batch: Batch, shares: Sequence[Share], index: int, all_reduce: Callable[[Tensor], Tensor]) -> Batch:
    """Returns rank `index`'s share of a batch on the host: its tokens, and the targets predicted from them.

    Positions and the lengths that documents are rotated by stay those of whole documents. Every rank knows all branches
    of trees with their facts.

    Args:
        all_reduce: as in `SharedBranches`.
    """
    share, total = shares[index], len(batch.tokens)
    rows = rows_of(share)
    row_of_token = torch.full((total,), -1).index_put_((rows,), torch.arange(len(rows)))
    predicted_from = row_of_token[batch.logits_indices]  # [N] -1: from a token of another rank
    own = predicted_from.ge(0).nonzero().squeeze(1)  # [n]
    weights = batch.weights[own]
    documents = _documents_of(batch)
    return replace(
        batch,
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        real=batch.real[rows],
        boundaries=tuple(itertools.accumulate((run.tokens for run in share.runs), initial=0)),
        packs=(0, len(rows)),
        logits_indices=predicted_from[own],
        targets=batch.targets[own],
        weights=weights,
        weight=float(weights.double().sum()),
        rows=tuple(batch.rows[int(documents[run.start])] for run in share.runs),
        target_sources=_sources_of(batch.target_sources, own, weights),
        branch=None if batch.branch is None else batch.branch[own],
        columns={name: column[own] for name, column in batch.columns.items()},
        routes=None if batch.routes is None else batch.routes[rows],
        shares=tuple(shares),
        document_lengths=_longest_paths(batch, documents)[rows],
        shared_branches=_shared_branches(batch, rows, row_of_token, own, index == 0, all_reduce),
    )


def _documents_of(batch: Batch) -> Tensor:
    """[T] int64: the document of each token."""
    sizes = torch.tensor(batch.boundaries).diff()
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def _longest_paths(batch: Batch, documents: Tensor) -> Tensor:
    """[T] int64: the tokens of each token's document, of a tree those of its longest path."""
    lengths = torch.zeros(len(batch.boundaries) - 1, dtype=torch.int64)
    return lengths.scatter_reduce_(0, documents, batch.positions + 1, "amax")[documents]


def _shared_branches(
    batch: Batch,
    rows: Tensor,
    row_of_token: Tensor,
    own: Tensor,
    are_counted: bool,
    all_reduce: Callable[[Tensor], Tensor],
) -> SharedBranches:
    """How the rank that has the tokens `rows` [t] and the targets `own` [n] of a batch takes part in its branches.

    row_of_token: [T] int64, the row here of each token of the batch, -1 for those of other ranks.
    """
    stops = torch.tensor([branch.stop for branch in batch.trees] or batch.boundaries[1:])  # [M]
    return SharedBranches(
        target_numbers=own,
        branch_of_token=torch.searchsorted(stops, rows, right=True),
        last_tokens=row_of_token[stops - 1],
        are_counted=are_counted,
        all_reduce=all_reduce,
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A batch of the host on a device, copied without the host waiting for the device."""
    moved = partial(copy_to, device=device)
    sources, lengths, shared = batch.target_sources, batch.document_lengths, batch.shared_branches
    return replace(
        batch,
        tokens=moved(batch.tokens),
        positions=moved(batch.positions),
        real=moved(batch.real),
        logits_indices=moved(batch.logits_indices),
        targets=moved(batch.targets),
        weights=moved(batch.weights),
        document_lengths=None if lengths is None else moved(lengths),
        target_sources=None if sources is None else replace(sources, indices=moved(sources.indices)),
        branch=None if batch.branch is None else moved(batch.branch),
        columns={name: moved(column) for name, column in batch.columns.items()},
        routes=None if batch.routes is None else moved(batch.routes),
        shared_branches=None if shared is None else replace(shared, target_numbers=moved(shared.target_numbers)),
    )


def _sources_of(sources: TargetSources | None, own: Tensor, weights: Tensor) -> TargetSources | None:
    if sources is None:
        return None
    indices = sources.indices[own]
    count = len(sources.names)
    sums = torch.zeros(count + 1, dtype=torch.float64).index_add_(0, indices, weights.double())
    return TargetSources(sources.names, indices, tuple(sums[:count].tolist()))
