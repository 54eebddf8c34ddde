"""The tokens of a packed sequence that each context rank holds, and its part of a micro-batch.

`shares` is a pure function, computed alike on every process. A micro-batch is cut after it was collated, so targets and
positions are those of whole documents, and no target is lost between two chunks.

A long document is cut into 2R chunks for R ranks, and rank r has r and 2R - 1 - r: under a causal mask the chunks near
the end have the most scores, and each rank has one as near to the end as its other one is to the beginning (zigzag, as
in ring-flash-attention and Megatron). Short documents stay whole, so that nothing of them travels, and are dealt
longest first, each to the rank that has the least to do (Graham's LPT rule).

A tree is cut by branches: those that are long are cut into chunks as a document is, of which a token sees the more the
later it comes on its path, and those that are short stay whole, each where there is the least to do.

T packed tokens · N trained targets · t tokens and n targets of one rank · M branches
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.types import WHOLE_SHARE, Batch, Branch, Run, Share, SharedBranches, TargetSources

TOKEN_COST = 8192
"""The cost of a token without attention, in scores (a query and a key).

A layer of width D multiplies a token with about 12 D^2 parameters and a score with 2 D numbers: 6 D, here of a layer of
width 1365.
"""


def shares(
    boundaries: Sequence[int],
    ranks: int,
    *,
    trees: Sequence[Branch] = (),
    uncut: Collection[int] = (),
    token_cost: int = TOKEN_COST,
) -> tuple[Share, ...]:
    """Returns the tokens of each of `ranks` context ranks; every token is on one of them.

    Args:
        boundaries: [documents + 1] offsets of the documents in the packed sequence, from 0 on, none of which is empty.
        trees: the branches of all documents, as in `Batch.trees`; empty where each document is one.
        uncut: numbers of documents that stay whole however long they are.
        token_cost: the cost of a token without its scores; see `TOKEN_COST`.
    """
    documents = _branches_of(boundaries, trees)
    costs = [sum(_cost_of(branch, token_cost) for branch in document) for document in documents]
    limit = WHOLE_SHARE * sum(costs) / ranks
    chunks: list[list[Run]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    whole: list[_Whole] = []
    for number, (document, document_cost) in enumerate(zip(documents, costs, strict=True)):
        if ranks == 1 or number in uncut or document_cost <= limit:
            whole.append(_Whole(document_cost, document, is_document=True))
            continue
        for branch in document:
            branch_cost = _cost_of(branch, token_cost)
            if branch_cost <= limit:
                whole.append(_Whole(branch_cost, [branch], is_document=False))
                continue
            for rank, run in _zigzag(branch, ranks):
                chunks[rank].append(run)
                loads[rank] += _cost_of(run, token_cost)
    own: list[list[Run]] = [[] for _ in range(ranks)]
    least_loaded = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least_loaded)
    for each in sorted(whole, key=lambda each: (-each.cost, each.runs[0].start)):
        load, rank = least_loaded[0]
        (own if each.is_document else chunks)[rank] += each.runs
        heapq.heapreplace(least_loaded, (load + each.cost, rank))
    return tuple(Share(tuple(sorted(runs)), tuple(sorted(cut))) for runs, cut in zip(own, chunks, strict=True))


class _Whole(NamedTuple):
    """Runs that stay together on one rank."""

    cost: int
    runs: Sequence[Run]
    is_document: bool  # all of one; else a branch of a document with other branches that may be elsewhere


def _branches_of(boundaries: Sequence[int], trees: Sequence[Branch]) -> list[list[Run]]:
    """The runs of each document, uncut: one for each of its branches."""
    if not trees:
        return [[Run(number, 0, *ends)] for number, ends in enumerate(itertools.pairwise(boundaries))]
    runs: list[Run] = []
    documents: list[list[Run]] = []
    for number, (parent, start, stop) in enumerate(trees):
        if parent < 0:
            documents.append([])
            runs.append(Run(number, 0, start, stop))
        else:
            above = runs[parent]
            position = above.position + above.tokens
            runs.append(Run(number, position, start, stop, (*above.ancestors, above.document)))
        documents[-1].append(runs[-1])
    return documents


def cost(first: int, last: int, token_cost: int = TOKEN_COST) -> int:
    """Returns the cost in scores of a document's tokens from position `first` up to, and not including, `last`."""
    count = last - first
    return count * token_cost + count * (first + last + 1) // 2


def _cost_of(run: Run, token_cost: int) -> int:
    return cost(run.position, run.position + run.tokens, token_cost)


def _zigzag(run: Run, ranks: int) -> Iterator[tuple[int, Run]]:
    """The chunks of a document or branch with the rank of each, in order; none is empty. The two in the middle are
    one."""
    length, count = run.tokens, 2 * ranks
    ends = [number * length // count for number in range(count + 1)]
    ends.pop(ranks)  # between the two in the middle, which are on the last rank
    for number, (first, last) in enumerate(itertools.pairwise(ends)):
        if first < last:
            chunk = run._replace(position=run.position + first, start=run.start + first, stop=run.start + last)
            yield min(number, count - 2 - number), chunk


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
    sizes = torch.tensor(batch.boundaries).diff()
    documents = torch.arange(len(sizes)).repeat_interleave(sizes)  # [T] the document of each token
    longest = torch.zeros(len(sizes), dtype=torch.int64).scatter_reduce_(0, documents, batch.positions + 1, "amax")
    stops = torch.tensor([branch.stop for branch in batch.trees] or batch.boundaries[1:])  # [M]
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
        document_lengths=longest[documents[rows]],
        shared_branches=SharedBranches(
            target_numbers=own,
            branch_of_token=torch.searchsorted(stops, rows, right=True),
            last_tokens=row_of_token[stops - 1],
            are_counted=index == 0,
            all_reduce=all_reduce,
        ),
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
