"""Values of targets as values of the branches that they are in, and branches as pairs of answers.

N targets · M branches · P pairs
"""

from __future__ import annotations

from torch import Tensor

from danlu.types import Batch

CHOSEN, REJECTED = 1.0, 0.0
"""The fact `label` of an answer: it was preferred (is desirable), or it was not; NaN for a branch that is no answer."""


def sum_by_branch(values: Tensor, batch: Batch) -> Tensor:
    """The weighted sum of `values` [N] over the targets of each branch: [M], differentiable; 0 without targets."""
    assert batch.branch is not None, "the samples of this stage are trees"
    return values.new_zeros(len(batch.trees)).index_add(0, batch.branch, values * batch.weights.to(values.dtype))


def pairs_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(chosen, rejected) branches [P] int64 of the micro-batch's pairs, on its device.

    The samples of a stage of pairs have one branch of each label, so pair n is the n-th of both.
    """
    label = batch.facts["label"]  # on the host, so nothing waits for the device
    chosen, rejected = ((label == value).nonzero().squeeze(1) for value in (CHOSEN, REJECTED))
    device = batch.tokens.device
    return chosen.to(device, non_blocking=True), rejected.to(device, non_blocking=True)
