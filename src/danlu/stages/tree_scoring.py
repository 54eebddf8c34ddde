"""Scores of a rollout's trees by the trainer's models, in a pass without gradients before the trees are trained on.

S tokens of a tree · N targets of a micro-batch · M branches
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from danlu.core.types import Batch, Outputs, Pack, Role
from danlu.recipe.value import VALUE
from danlu.rl.estimators import LAST_VALUE, REFERENCE, VALUE_OLD
from danlu.rl.experience import Scores
from danlu.rl.experience_trees import OLD, SUPPORT
from danlu.stages.learner import DecoderLearner
from danlu.stages.no_grad_pass import no_grad_pass


@dataclass(frozen=True)
class _Scored:
    """The models' scores of a micro-batch."""

    of_targets: Tensor  # [names, N] float32
    target_numbers: Tensor | None  # where context ranks share trees: which of all targets these are
    last: Tensor | None  # [M] float32: values at the ends of branches, of which this process counts


@dataclass(frozen=True)
class TreeScorer:
    """Computes scores with the learner's models, without dropout; every process has the scores of all items.

    Args:
        old, reference, values: whether it computes the policy's log-probabilities, the reference's, the critic's
            values.
        temperature: the temperature that answers were drawn with.
        teachers: roles of models that score log-probabilities too; their scores have these names.
    """

    learner: DecoderLearner
    old: bool
    reference: bool
    values: bool
    temperature: float
    teachers: tuple[Role, ...] = ()

    def __call__(self, items: Sequence[Pack]) -> Scores:
        """The scores of each item's tokens and branches."""
        names = [
            name for name, asked in ((OLD, self.old), (REFERENCE, self.reference), (VALUE_OLD, self.values)) if asked
        ] + list(self.teachers)
        token_starts = np.cumsum([0, *(item.tokens for item in items)])
        branch_starts = np.cumsum([0, *(len(item.samples[0].branches) for item in items)])
        of_tokens = torch.zeros(len(names), int(token_starts[-1]), dtype=torch.float32)
        of_branches = torch.zeros(int(branch_starts[-1]), dtype=torch.float32)
        micro_batches = self.learner.micro_batches(items)
        for numbers, scored in no_grad_pass(self.learner.judged_by, items, micro_batches, self._scored, self._roles):
            if not numbers:
                continue
            trained = [token_starts[number] + np.flatnonzero(items[number].samples[0].weights) for number in numbers]
            places = torch.from_numpy(np.concatenate(trained))
            if scored.target_numbers is not None:
                places = places[scored.target_numbers]
            of_tokens[:, places] = scored.of_targets[:, : len(places)]
            if scored.last is not None:
                own = [np.arange(branch_starts[number], branch_starts[number + 1]) for number in numbers]
                branches = torch.from_numpy(np.concatenate(own))
                of_branches[branches] = scored.last[: len(branches)]
        parallel = self.learner.parallel
        scores = parallel.all_reduce_data(of_tokens), parallel.all_reduce_data(of_branches)
        of_tokens, of_branches = parallel.from_end_of_pipeline(scores)
        parallel.reshard()
        of_items = list(zip(itertools.pairwise(token_starts), itertools.pairwise(branch_starts), strict=True))
        columns, ends = of_tokens.numpy(), of_branches.numpy()
        token_scores = [
            {name: columns[row, start:stop] for row, name in enumerate(names)} for (start, stop), _ in of_items
        ]
        branch_scores = [{LAST_VALUE: ends[start:stop]} if self.values else {} for _, (start, stop) in of_items]
        return token_scores, branch_scores

    @property
    def _roles(self) -> list[Role]:
        """The roles of the models that score, apart from the policy."""
        own = [*([REFERENCE] if self.reference else []), *([self._critic] if self.values else [])]
        return [*own, *self.teachers]

    @property
    def _critic(self) -> Role:
        return "policy" if self.learner.critic is None else VALUE

    def _scored(self, outputs: Mapping[Role, Outputs], batch: Batch) -> _Scored:
        """Computes the scores of a micro-batch, with empty items after its own."""
        of_targets: list[Tensor] = []
        support = batch.columns.get(SUPPORT)
        support = None if support is None else support.long()
        if self.old:
            of_targets.append(outputs["policy"].logprobs(temperature=self.temperature, support=support).logprobs)
        if self.reference:
            of_targets.append(outputs["reference"].logprobs(temperature=self.temperature, support=support).logprobs)
        if self.values:
            of_targets.append(outputs[self._critic].values())
        for role in self.teachers:
            of_targets.append(outputs[role].logprobs(temperature=self.temperature, support=support).logprobs)
        shared = batch.shared_branches
        # Of context ranks, which share trees, all take part and one counts.
        last = outputs[self._critic].scores().float().reshape(-1).cpu() if self.values else None
        if shared is not None and not shared.are_counted:
            last = None
        return _Scored(
            torch.stack([values.float().cpu() for values in of_targets]),
            None if shared is None else shared.target_numbers.cpu(),
            last,
        )
