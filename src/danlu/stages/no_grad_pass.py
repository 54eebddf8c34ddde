"""Passes without gradients: a stage's models compute outputs for items, through all chunks of a pipeline.

Such a pass is that of an evaluation: the same lists of forward passes; its last chunk keeps values in place of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from danlu.assembly.parallelize import Placed, token_shares
from danlu.core.types import Batch, Loss, Objective, Outputs, Pack, Role, Totals
from danlu.planning.precision import DTYPES
from danlu.recipe import Recipe
from danlu.stages.learner import DecoderLearner
from danlu.stages.roles import forward_of
from danlu.training.executor import AnyLearner, Executor
from danlu.training.learner import StepItems

T = TypeVar("T")


def learner_to_ask(recipe: Recipe, placed: Placed, device: torch.device) -> DecoderLearner:
    """A placed model as the policy of a learner that trains nothing, for passes without gradients.

    device: of micro-batches.
    """
    model = placed.subject.model
    return DecoderLearner(
        model,
        forward_of(model, compiled=recipe.compile),
        device,
        DTYPES[recipe.precision],
        micro=1,
        adapters=placed.subject.adapters,
        parallel=placed.parallel,
        token_multiple=token_shares(recipe.parallel, placed.parallel.ranks),
        exact=recipe.numerics == "exact",
    )


@dataclass(frozen=True)
class _Kept(Generic[T]):
    """An objective without a loss, which keeps the value that `compute` makes of each micro-batch."""

    compute: Callable[[Mapping[Role, Outputs], Batch], T]
    values: list[T] = field(default_factory=list)
    needs = frozenset[str]()

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        self.values.append(self.compute(outputs, batch))
        return Loss(torch.zeros(()))


@dataclass(frozen=True)
class _KeptOfRoles(_Kept[T]):
    """The same for some models apart from the policy; the others do not run."""

    roles: frozenset[Role] = frozenset()


def no_grad_pass(
    learner_of: Callable[[Objective], AnyLearner],
    items: Sequence[Pack],
    micro_batches: Sequence[Sequence[int]],
    compute: Callable[[Mapping[Role, Outputs], Batch], T],
    roles: Collection[Role] | None = None,
) -> Iterator[tuple[Sequence[int], T]]:
    """Yields (numbers of its items, the value of `compute` for the models' outputs) of each micro-batch of this
    process, in their order; every process exhausts it.

    Pipeline stages without the last chunk, which have no outputs, yield nothing.

    learner_of: the learner that evaluates with an objective. micro_batches: as many on every process, some may be
    empty: these go through the models with a filler. roles: the models that run next to the policy; None: all frozen
    ones.
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
