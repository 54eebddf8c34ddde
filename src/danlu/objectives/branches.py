"""Values of targets as values of the branches that they are in, and branches as pairs of answers.

N targets · M branches · P pairs
"""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.types import Batch

CHOSEN, REJECTED = 1.0, 0.0
"""The fact `label` of an answer: it was preferred (is desirable), or it was not; NaN for a branch that is no answer."""


def sum_by_branch(values: Tensor, batch: Batch) -> Tensor:
    """The weighted sum of `values` [N] over the targets of each branch: [M], differentiable; 0 without targets.

    Where context ranks have targets of the same branches it is the sum over all of them, on each.
    """
    return sum_over_ranks(local_sum_by_branch(values, batch), batch)


def local_sum_by_branch(values: Tensor, batch: Batch) -> Tensor:
    """`sum_by_branch` over the targets that this process has."""
    assert batch.branch is not None, "the samples of this stage are trees"
    return values.new_zeros(len(batch.trees)).index_add(0, batch.branch, values * batch.weights.to(values.dtype))


def sum_over_ranks(values: Tensor, batch: Batch) -> Tensor:
    """`values` of branches or groups of them, summed over the context ranks that have targets of the same ones."""
    return values if batch.shared_branches is None else batch.shared_branches.all_reduce(values)


def counted(branches: Tensor, batch: Batch) -> Tensor:
    """Returns those of `branches` [K] that this rank counts in losses and metrics: of the context ranks that share
    them, one does.

    The others go through the same operations with none, so that gradients of sums over branches meet.
    """
    shared = batch.shared_branches
    return branches if shared is None or shared.are_counted else branches[:0]


def places_in_branch(batch: Batch) -> tuple[Tensor, Tensor]:
    """(the place of each target among those of its branch [N] int64, the targets of each branch [M] int64)."""
    assert batch.branch is not None, "the samples of this stage are trees"
    counts = torch.zeros(len(batch.trees), dtype=torch.int64, device=batch.branch.device)
    counts = sum_over_ranks(counts.index_add(0, batch.branch, torch.ones_like(batch.branch)), batch)
    starts = counts.cumsum(0) - counts  # targets are in the order of the branches
    shared = batch.shared_branches
    numbers = torch.arange(len(batch.branch), device=batch.branch.device) if shared is None else shared.target_numbers
    return numbers - starts[batch.branch], counts


def labelled(batch: Batch, label: float) -> Tensor:
    """The branches [K] int64 of this label, on the host, where facts are: nothing waits for the device."""
    return (batch.facts["label"] == label).nonzero().squeeze(1)


def pairs_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(chosen, rejected) branches [P] int64 of the micro-batch's pairs, on its device.

    The samples of a stage of pairs have one branch of each label, so pair n is the n-th of both.
    """
    device = batch.tokens.device
    chosen, rejected = (copy_to(labelled(batch, label), device) for label in (CHOSEN, REJECTED))
    return chosen, rejected
