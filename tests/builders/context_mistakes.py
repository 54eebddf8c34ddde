"""Learners on context ranks that make a mistake with branches whose tokens lie on several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from danlu.core.types import Batch, Pack, SharedBranches
from danlu.stages.learner import DecoderLearner


class SumsOfOneRank(DecoderLearner):
    """Each rank takes the sum over its own targets for that of the branch."""

    def collate(self, items: Sequence[Pack]) -> Batch:
        batch = super().collate(items)
        return replace(batch, shared_branches=replace(_shared(batch), all_reduce=lambda x: x))


class GradientOfOneRank(DecoderLearner):
    """The gradient of a branch's sum stays on the rank that counts the branch."""

    def collate(self, items: Sequence[Pack]) -> Batch:
        batch = super().collate(items)
        shared = _shared(batch)

        def all_reduce(x: Tensor) -> Tensor:
            return x + (shared.all_reduce(x.detach()) - x.detach())

        return replace(batch, shared_branches=replace(shared, all_reduce=all_reduce))


class CountedByAll(DecoderLearner):
    """Each rank adds the losses and metrics of whole branches to the step's."""

    def collate(self, items: Sequence[Pack]) -> Batch:
        batch = super().collate(items)
        return replace(batch, shared_branches=replace(_shared(batch), are_counted=True))


def _shared(batch: Batch) -> SharedBranches:
    assert batch.shared_branches is not None, "a batch of trees, of which context ranks have parts"
    return batch.shared_branches
