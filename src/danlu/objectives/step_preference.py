"""Preference objectives that have to see the whole step before its first micro-batch: sorts and means over it.

M branches of a step · P pairs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from danlu.core.types import Batch, Branch, Loss, Outputs, Pack, Role, Sample, StepLogprobs, Totals
from danlu.objectives.branches import CHOSEN, REJECTED
from danlu.objectives.preference_losses import AOT_PARTNER, AOT_UNPAIRED_PARTNER, BCO_SHIFT, KTO_KL
from danlu.recipe.sections import Aot, AotUnpaired, Bco, Kto, PreferenceTerm

if TYPE_CHECKING:
    from danlu.objectives.preference import Preference


def sees_whole_step(term: PreferenceTerm) -> bool:
    """Whether the loss of a pair or answer depends on the others of its step."""
    return isinstance(term, Aot | AotUnpaired | Kto) or (isinstance(term, Bco) and term.shift != "none")


class StepPreference(nn.Module):
    """A `Preference` with terms that sort the pairs of a step, or take a mean over it: a `StepObjective`.

    The values of the step that such a term needs become facts of each answer, after which losses and gradients of
    micro-batches add up to those of the whole step. A running mean is a buffer, so it is part of every checkpoint.
    """

    mean_ratio: Tensor
    steps_seen: Tensor

    def __init__(self, preference: Preference) -> None:
        super().__init__()
        self.preference = preference
        self.has_running_mean = any(isinstance(term, Bco) and term.shift == "running-mean" for term in preference.terms)
        if self.has_running_mean:
            self.register_buffer("mean_ratio", torch.zeros((), dtype=torch.float64))
            self.register_buffer("steps_seen", torch.zeros((), dtype=torch.float64))

    @property
    def needs(self) -> frozenset[str]:
        """Model outputs that this objective reads, such as "logprobs"."""
        return self.preference.needs

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """Those of the losses."""
        return self.preference.divisors(items)

    def forward(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of a micro-batch of prepared items."""
        return self.preference(outputs, batch, totals)

    def step_items(self, items: Sequence[Pack]) -> Sequence[Pack]:
        """The items as they are; of judged answers, only the mismatched ones."""
        if self.preference.paired:
            return items
        return [_of_samples(pack, _mismatched_alone) for pack in items]

    def prepared(self, items: Sequence[Pack], logprobs: StepLogprobs, *, training: bool) -> Sequence[Pack]:
        """Returns the items with the facts that terms need of the step; judged answers come without the mismatched
        ones.
        """
        if not self.preference.paired:
            items = [_of_samples(pack, _answers_alone) for pack in items]
            divergence = _kl_estimate(logprobs)
            return _with_facts(items, {KTO_KL: np.full(_branches(items), divergence)})
        reference = torch.zeros_like(logprobs.policy) if logprobs.reference is None else logprobs.reference
        label = logprobs.facts["label"]
        chosen, rejected = ((label == value).nonzero().squeeze(1) for value in (CHOSEN, REJECTED))
        facts: dict[str, Tensor] = {}
        if self._has(Aot):
            facts[AOT_PARTNER] = torch.full_like(reference, torch.nan)
            policy_order = (logprobs.policy[chosen] - logprobs.policy[rejected]).argsort(stable=True)
            sorted_reference = (reference[chosen] - reference[rejected]).sort().values
            facts[AOT_PARTNER][chosen[policy_order]] = sorted_reference
        ratios = logprobs.policy - reference
        if self._has(AotUnpaired):
            facts[AOT_UNPAIRED_PARTNER] = torch.full_like(reference, torch.nan)
            chosen_order, rejected_order = (ratios[each].argsort(stable=True) for each in (chosen, rejected))
            chosen_ranked, rejected_ranked = chosen[chosen_order], rejected[rejected_order]
            facts[AOT_UNPAIRED_PARTNER][chosen_ranked] = ratios[rejected_ranked]
            facts[AOT_UNPAIRED_PARTNER][rejected_ranked] = ratios[chosen_ranked]
        if self.has_running_mean:
            mean = self._running_mean(float(ratios[torch.cat((chosen, rejected))].mean()), training)
            facts[BCO_SHIFT] = torch.full_like(reference, mean)
        return _with_facts(items, {name: values.numpy() for name, values in facts.items()})

    def _has(self, kind: type[PreferenceTerm]) -> bool:
        return any(isinstance(term, kind) for term in self.preference.terms)

    def _running_mean(self, of_step: float, training: bool) -> float:
        """The mean over all steps so far, this one included; a step of evaluation leaves it alone."""
        seen, mean = float(self.steps_seen), float(self.mean_ratio)
        if not training and seen:
            return mean
        mean += (of_step - mean) / (seen + 1)
        if training:
            self.mean_ratio.fill_(mean)
            self.steps_seen.fill_(seen + 1)
        return mean


def with_mismatched_targets(sample: Sample) -> Sample:
    """The sample with targets in its mismatched branches too, which otherwise have none."""
    weights = sample.weights.copy()
    for (_, start, stop), mismatched in zip(sample.branches, sample.facts["mismatched"], strict=True):
        if mismatched == 1:
            weights[start:stop] = 1
    return replace(sample, weights=weights)


def _kl_estimate(logprobs: StepLogprobs) -> float:
    """The mean log-ratio of mismatched answers, at least 0 as the KL divergence is (arXiv:2402.01306, section 4.1)."""
    assert logprobs.reference is not None, "a divergence is one from a reference"
    ratios = (logprobs.policy - logprobs.reference)[logprobs.facts["mismatched"] == 1]
    return float(ratios.mean().clamp(min=0))


def _mismatched_alone(sample: Sample) -> Sample:
    return _with_branches(with_mismatched_targets(sample), sample.facts["mismatched"] == 1)


def _answers_alone(sample: Sample) -> Sample:
    return _with_branches(sample, ~np.isnan(sample.facts["label"]))


def _with_branches(sample: Sample, wanted: np.ndarray) -> Sample:
    """The sample cut down to some branches and their ancestors.

    wanted: [branches] bool.
    """
    kept = wanted.copy()
    for number in reversed(range(len(kept))):  # descendants first: a branch comes after its parent
        parent = sample.branches[number].parent
        if kept[number] and parent >= 0:
            kept[parent] = True
    numbers = np.cumsum(kept) - 1
    branches, end = list[Branch](), 0
    for number in np.flatnonzero(kept).tolist():
        parent, start, stop = sample.branches[number]
        branches.append(Branch(int(numbers[parent]) if parent >= 0 else -1, end, end + stop - start))
        end += stop - start
    tokens = np.repeat(kept, [stop - start for _, start, stop in sample.branches])
    return replace(
        sample,
        tokens=sample.tokens[tokens],
        weights=sample.weights[tokens],
        branches=tuple(branches),
        columns={name: values[tokens] for name, values in sample.columns.items()},
        facts={name: values[kept] for name, values in sample.facts.items()},
    )


def _of_samples(pack: Pack, function: Callable[[Sample], Sample]) -> Pack:
    return Pack(tuple(function(sample) for sample in pack.samples))


def _branches(items: Sequence[Pack]) -> int:
    return sum(len(sample.branches) for pack in items for sample in pack.samples)


def _with_facts(items: Sequence[Pack], facts: Mapping[str, np.ndarray]) -> list[Pack]:
    """The items with more facts: [M] each, in the order of the items' branches."""
    start = 0

    def with_own(sample: Sample) -> Sample:
        nonlocal start
        own = slice(start, start + len(sample.branches))
        start = own.stop
        added = {name: values[own].astype(np.float32) for name, values in facts.items()}
        return replace(sample, facts={**sample.facts, **added})

    return [_of_samples(pack, with_own) for pack in items]
