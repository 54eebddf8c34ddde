"""The objective of stage `preference`: a weighted sum of losses over log-probabilities of whole answers.

Terms that sort the pairs of a step, or take a mean over it, have to see the whole step before its first micro-batch
(`StepPreference`).

N targets · M branches · P pairs, or answers of one label
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from danlu.core.device_moves import copy_to
from danlu.core.types import (
    Batch,
    Branch,
    Loss,
    Metric,
    Outputs,
    Pack,
    Role,
    Sample,
    StepLogprobs,
    TokenLogprobs,
    Totals,
)
from danlu.objectives.branches import CHOSEN, REJECTED, counted, labelled, pairs_of, places_in_branch, sum_by_branch
from danlu.objectives.preference_losses import (
    AOT_PARTNER,
    AOT_UNPAIRED_PARTNER,
    BCO_SHIFT,
    JUDGED_LOSSES,
    KTO_KL,
    NLL_WEIGHTS,
    PAIR_LOSSES,
    STEP_FACTS,
    Answers,
)
from danlu.recipe.sections import Aot, AotUnpaired, Bco, JudgedTerm, Kto, LogRatioTerm, Orpo, PreferenceTerm, Simpo


def preference_objective(terms: Sequence[PreferenceTerm], has_reference: bool) -> Preference | StepPreference:
    """The objective that is the weighted sum of `terms`, with or without a model in the role of reference."""
    preference = Preference(tuple(terms), has_reference)
    return StepPreference(preference) if any(map(sees_whole_step, terms)) else preference


@dataclass(frozen=True)
class Preference:
    """A weighted sum of terms over pairs of answers, or over answers that were judged alone.

    Each loss is a mean over the pairs (the answers) of the whole step, each negative log-likelihood one over the tokens
    of its chosen answers.
    """

    terms: tuple[PreferenceTerm, ...]
    has_reference: bool  # else the policy is compared with nothing: log-ratios are its log-probabilities

    @property
    def needs(self) -> frozenset[str]:
        """Log-probabilities, of the policy and of the reference where there is one."""
        return frozenset({"logprobs"})

    @property
    def paired(self) -> bool:
        """Whether rows are pairs of answers; else answers that were judged alone."""
        return not any(isinstance(term, JudgedTerm) for term in self.terms)

    @property
    def better(self) -> dict[str, Literal["lower", "higher"]]:
        """The metrics that a run may be judged by besides its loss, and the better direction of each."""
        names = list(_names(self.terms)) if len(self.terms) > 1 else []
        higher = ["accuracy", "margin"] if self.paired else ["margin"]
        return {**dict.fromkeys(higher, "higher"), **dict.fromkeys((f"loss/{name}" for name in names), "lower")}

    @property
    def leading(self) -> PreferenceTerm:
        """The term that gives the reported implicit rewards: the first one that compares answers."""
        return next((term for term in self.terms if term.kind != "sft"), self.terms[0])

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """The chosen (desirable) and rejected (undesirable) answers of a step, and the weight of the chosen's tokens.

        Of pairs there are as many as of chosen answers.
        """
        chosen = rejected = chosen_tokens = 0.0
        for sample in (sample for pack in items for sample in pack.samples):
            for (_, start, stop), label in zip(sample.branches, sample.facts["label"].tolist(), strict=True):
                chosen += label == CHOSEN
                rejected += label == REJECTED
                if label == CHOSEN:
                    chosen_tokens += float(sample.weights[start:stop].sum(dtype="float64"))
        return {"chosen": chosen, "rejected": rejected, "chosen_tokens": chosen_tokens}

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the micro-batch's answers."""
        weighs_pairs = any(map(_weighs_pairs, self.terms))
        policy = outputs["policy"].logprobs(collision=weighs_pairs)
        reference = outputs["reference"].logprobs().logprobs if self.has_reference else None
        tokens = _AnswerTokens(batch, policy, reference)
        answers = {ld_alpha: tokens.sums(ld_alpha) for ld_alpha in (None, *map(_ld_alpha, self.terms))}
        divisors = totals.divisors
        divisor = divisors["chosen"] if self.paired else divisors["chosen"] + divisors["rejected"]
        losses_of = _pair_losses if self.paired else _judged_losses
        nll = _mean(-answers[None].chosen, divisors["chosen_tokens"])
        total, losses = torch.zeros_like(nll), dict[str, Tensor]()
        for name, term in zip(_names(self.terms), self.terms, strict=True):
            loss = _mean(losses_of(term, answers[_ld_alpha(term)]), divisor)
            if term.kind in NLL_WEIGHTS:
                loss = loss + NLL_WEIGHTS[term.kind](term) * nll
            losses[name], total = loss.detach(), total + term.weight * loss
        metrics = _reward_metrics(self.leading, answers[_ld_alpha(self.leading)], divisors, self.paired)
        plain = answers[None]
        for name, values in (("chosen", plain.chosen), ("rejected", plain.rejected)):
            metrics[f"logps/{name}"] = Metric(values.detach().sum(), float(len(values)))
        if any(term.needs_mismatched for term in self.terms):
            kl = torch.cat((plain.chosen_facts[KTO_KL], plain.rejected_facts[KTO_KL]))
            metrics["kl"] = Metric(kl.sum(), float(len(kl)))
        if len(losses) > 1:  # parts of means over the step, with shares that add up to 1
            count = len(plain.chosen) + (0 if self.paired else len(plain.rejected))
            metrics |= {f"loss/{name}": Metric(loss, count / divisor) for name, loss in losses.items()}
        return Loss(total * totals.weight, metrics)


@dataclass(frozen=True)
class _AnswerTokens:
    """The log-probabilities of the tokens of a micro-batch's answers."""

    batch: Batch
    policy: TokenLogprobs  # [N]; with `collision` where pairs are weighed
    reference: Tensor | None  # [N]

    @cached_property
    def branches(self) -> tuple[Tensor, Tensor]:
        """The branches of (chosen, rejected) answers that are counted here, [P] int64 each."""
        chosen, rejected = pairs_of(self.batch)
        return counted(chosen, self.batch), counted(rejected, self.batch)

    def sums(self, ld_alpha: float | None) -> Answers:
        """Sums over tokens; `ld_alpha` is the weight of those that one answer of a pair has more than the other."""
        factors = None if ld_alpha is None else self._length_factors(ld_alpha)
        of_policy = self._by_answer(self.policy.logprobs, factors)
        nothing = torch.zeros_like(of_policy[0]), torch.zeros_like(of_policy[1])
        of_reference = nothing if self.reference is None else self._by_answer(self.reference, factors)
        on_host = [counted(labelled(self.batch, label), self.batch) for label in (CHOSEN, REJECTED)]
        margins = nothing[0].new_zeros(())
        if "margin" in self.batch.facts:
            margins = copy_to(self.batch.facts["margin"][on_host[0]].nan_to_num(0.0).to(margins.dtype), margins.device)
        return Answers(
            *of_policy,
            *of_reference,
            *self._by_answer(torch.ones_like(self.batch.weights), None),
            margins,
            self._step_facts(on_host[0]),
            self._step_facts(on_host[1]),
            None if self.policy.collision is None else self._pair_likelihood(self.policy.collision),
        )

    def _by_answer(self, values: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of `values` [N], times `factors` [N], over each (chosen, rejected) answer: [P] float64."""
        wide = values.double()
        by_branch = sum_by_branch(wide if factors is None else wide * factors, self.batch)  # [M]
        return by_branch[self.branches[0]], by_branch[self.branches[1]]

    def _length_factors(self, ld_alpha: float) -> Tensor:
        """1 for the targets that both answers of a pair have by number, `ld_alpha` for the rest of the longer: [N]."""
        assert self.batch.branch is not None, "the samples of this stage are trees"
        places, counts = places_in_branch(self.batch)
        chosen, rejected = pairs_of(self.batch)
        shorter = torch.minimum(counts[chosen], counts[rejected])
        shared = counts.index_copy(0, chosen, shorter).index_copy(0, rejected, shorter)  # [M]
        beyond = torch.full_like(places, ld_alpha, dtype=torch.float64)
        return beyond.masked_fill(places < shared[self.batch.branch], 1.0)

    def _pair_likelihood(self, collision: Tensor) -> Tensor:
        """How likely the policy is to write both answers of each pair [P], relative to its own choices at each token.

        The product of both answers' geometric means over tokens of p(token) / sum_v p(v)^2 (WPO, arXiv:2406.11827,
        equation 2), without gradient.
        """
        aligned = self._by_answer(self.policy.logprobs.detach() - collision, None)
        tokens = self._by_answer(torch.ones_like(self.batch.weights), None)
        return (aligned[0] / tokens[0] + aligned[1] / tokens[1]).exp()

    def _step_facts(self, branches: Tensor) -> dict[str, Tensor]:
        """Returns the facts about the whole step of these branches [K] on the host: [K] float64 on the device.

        A micro-batch without answers was not prepared, and has no values for any fact.
        """
        device, facts = self.batch.tokens.device, self.batch.facts
        if not len(branches):
            return {name: torch.zeros(0, dtype=torch.float64, device=device) for name in STEP_FACTS}
        return {name: copy_to(facts[name][branches].double(), device) for name in STEP_FACTS if name in facts}


def _mean(values: Tensor, divisor: float) -> Tensor:
    """This micro-batch's part of a mean over the step; 0 where the step has nothing to divide by."""
    return values.sum() / divisor if divisor else values.sum() * 0.0


def _weighs_pairs(term: PreferenceTerm) -> bool:
    return isinstance(term, LogRatioTerm) and term.wpo


def _ld_alpha(term: PreferenceTerm) -> float | None:
    return term.ld_alpha if isinstance(term, LogRatioTerm) else None


def _names(terms: Sequence[PreferenceTerm]) -> Iterator[str]:
    """The kind of each term, with a number behind it from the second of the same kind on."""
    kinds = [term.kind for term in terms]
    for number, kind in enumerate(kinds):
        earlier = kinds[:number].count(kind)
        yield f"{kind}-{earlier + 1}" if earlier else kind


def _pair_losses(term: PreferenceTerm, answers: Answers) -> Tensor:
    """Returns [P] float64 without the likelihood that some terms add; empty for a term that is only a likelihood."""
    if term.kind not in PAIR_LOSSES:
        return answers.chosen.new_zeros(0)
    losses = PAIR_LOSSES[term.kind](term, answers)
    if not _weighs_pairs(term):
        return losses
    assert answers.pair_likelihood is not None, "it was asked for with the log-probabilities"
    return losses * answers.pair_likelihood


def _judged_losses(term: PreferenceTerm, answers: Answers) -> Tensor:
    """[answers] float64, those of desirable answers first; empty for a term that is a likelihood alone."""
    if not isinstance(term, JudgedTerm):
        return answers.chosen.new_zeros(0)
    desirable, undesirable = JUDGED_LOSSES[term.kind](term, answers)
    return torch.cat((term.desirable * desirable, term.undesirable * undesirable))


def _reward_metrics(
    term: PreferenceTerm, answers: Answers, divisors: Mapping[str, float], paired: bool
) -> dict[str, Metric]:
    """Returns the implicit rewards of `term`, beta times log-probabilities or their ratios, and their margin."""
    values = (answers.chosen, answers.rejected)
    if isinstance(term, Simpo | Orpo):
        values = answers.per_token
    elif term.needs_reference:
        values = answers.ratios
    chosen, rejected = (getattr(term, "beta", 1.0) * value.detach() for value in values)
    metrics = {
        "rewards/chosen": Metric(chosen.sum(), float(len(chosen))),
        "rewards/rejected": Metric(rejected.sum(), float(len(rejected))),
    }
    if paired:
        margins = chosen - rejected
        metrics["accuracy"] = Metric((margins > 0).to(margins).sum(), float(len(margins)))
        metrics["margin"] = Metric(margins.sum(), float(len(margins)))
        return metrics
    # A difference of two means, each over its own answers: parts with shares that add up to 1, if there are both.
    difference = _mean(chosen, divisors["chosen"]) - _mean(rejected, divisors["rejected"])
    has_both = divisors["chosen"] > 0 and divisors["rejected"] > 0
    share = (len(chosen) + len(rejected)) / (divisors["chosen"] + divisors["rejected"])
    metrics["margin"] = Metric(difference, share if has_both else 0.0)
    return metrics


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
    return sample.rearranged(tokens, branches, kept)


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
