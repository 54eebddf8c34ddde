"""What the models of a stage say of items without gradients, in a pass through all chunks of a pipeline.

It is the pass of an evaluation: the same lists of forward passes, whose last chunk keeps values in the place of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from danlu.core.types import Batch, Loss, Objective, Outputs, Pack, Role, Totals
from danlu.training.executor import AnyLearner, Executor
from danlu.training.learner import StepItems

T = TypeVar("T")


@dataclass(frozen=True)
class _Kept(Generic[T]):
    """An objective that has no loss, and keeps what `compute` makes of each micro-batch."""

    compute: Callable[[Mapping[Role, Outputs], Batch], T]
    values: list[T] = field(default_factory=list)
    needs = frozenset[str]()

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        self.values.append(self.compute(outputs, batch))
        return Loss(torch.zeros(()))


@dataclass(frozen=True)
class _KeptOfRoles(_Kept[T]):
    """The same of some models beside the policy; the others are not asked."""

    roles: frozenset[Role] = frozenset()


def no_grad_pass(
    learner_of: Callable[[Objective], AnyLearner],
    items: Sequence[Pack],
    micro_batches: Sequence[Sequence[int]],
    compute: Callable[[Mapping[Role, Outputs], Batch], T],
    roles: Collection[Role] | None = None,
) -> Iterator[tuple[Sequence[int], T]]:
    """Yields (numbers of its items, what `compute` makes of the outputs of the models) of each micro-batch of this
    process, in their order; every process exhausts it.

    Of a pipeline the stages without the last chunk, which have no outputs, yield nothing.

    learner_of: the learner whose evaluations have an objective. micro_batches: as many on every process, some may be
    empty: these go through the models with a filler. roles: the models that are asked beside the policy; None: all that
    are frozen.
    """
    kept = _Kept(compute) if roles is None else _KeptOfRoles(compute, roles=frozenset(roles))
    learner = learner_of(kept)
    executor = Executor(learner, StepItems(items, micro_batches, Totals.of(items)))
    for actions, numbers in learner.parallel.pipeline.evaluation_rounds(len(micro_batches)):
        executor.run(actions)
        # The last chunk sees micro-batches in their order: see `parallel.schedules.evaluation_actions`.
        values, kept.values[:] = [*kept.values], []
        if values:
            yield from zip((micro_batches[number] for number in numbers), values, strict=True)
