"""Passes without gradients: a stage's models compute outputs for items, through all chunks of a pipeline.

Such a pass is that of an evaluation: the same lists of forward passes; its last chunk keeps values in place of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from danlu.assembly.parallelize import Placed, token_shares
from danlu.core.types import Batch, Loss, Objective, Outputs, Pack, Role, StepLogprobs, Totals
from danlu.numerics.dtypes import DTYPES
from danlu.objectives.branches import local_sum_by_branch
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
        DTYPES[recipe.activations],
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
    for actions, numbers in learner.parallel.evaluation_rounds(len(micro_batches)):
        executor.run(actions)
        # The last chunk sees micro-batches in their order: see `parallel.schedules.evaluation_actions`.
        values, kept.values[:] = [*kept.values], []
        if values:
            yield from zip((micro_batches[number] for number in numbers), values, strict=True)


def step_logprobs(
    learner: DecoderLearner, items: Sequence[Pack], micro_batches: Sequence[Sequence[int]], step: int | None
) -> StepLogprobs:
    """The log-probabilities of all branches of a step on every process: the policy's with the dropout of the step, the
    reference's without. Of a pipeline the stage with the last chunk tells the others."""
    counts = [sum(len(sample.branches) for sample in pack.samples) for pack in items]
    starts = np.cumsum([0, *counts]).tolist()
    has_reference = "reference" in learner.roles

    def sums_of(outputs: Mapping[Role, Outputs], batch: Batch) -> Tensor:
        """[3, M] of policy, reference and targets: sums over those of this process, for all are added up below."""
        policy = local_sum_by_branch(outputs["policy"].logprobs().logprobs, batch)
        reference = policy
        if has_reference:
            reference = local_sum_by_branch(outputs["reference"].logprobs().logprobs, batch)
        return torch.stack((policy, reference, local_sum_by_branch(torch.ones_like(batch.weights), batch)))

    # They stay on the device until all are made.
    asked = partial(learner.judged_by, dropout_step=step)
    own = [*no_grad_pass(asked, items, micro_batches, sums_of)]
    sums = torch.zeros(3, starts[-1], dtype=torch.float64)
    for numbers, values in own:
        places = [place for number in numbers for place in range(starts[number], starts[number + 1])]
        sums[:, places] = values.double().cpu()[:, : len(places)]
    sums = learner.parallel.from_end_of_pipeline(learner.parallel.all_reduce_data(sums))
    facts = {
        name: torch.from_numpy(np.concatenate([sample.facts[name] for pack in items for sample in pack.samples]))
        for name in items[0].samples[0].facts
    }
    return StepLogprobs(sums[0], sums[1] if has_reference else None, sums[2], facts)
