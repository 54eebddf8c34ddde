"""The objective of stage `rl`: policy gradients over groups of answers, and how held-out answers are judged.

N targets, which are the tokens that were drawn and are trained · M branches, of which answers have facts
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.types import Batch, Loss, Metric, Outputs, Pack, Role, TokenLogprobs, Totals
from danlu.objectives.branches import counted, sum_over_ranks
from danlu.objectives.distillation import TeacherDivergence
from danlu.objectives.policy_losses import (
    Answers,
    GammaWeight,
    ImportanceBounds,
    KlEstimator,
    RatioLevel,
    cispo,
    clip_shares,
    clipped,
    importance_weights,
    kl_estimate,
    off_policy_mask,
    ratios,
    sapo,
    vespo,
)

PolicyLoss = Literal["clip", "cispo", "sapo", "vespo"]
"""PPO's clipped surrogate, or a loss proposed in its place: see `policy_losses`."""
Normalise = Literal["tokens", "sequences", "constant", "groups"]
"""The normalisation of the sum over tokens.

It is the mean over all tokens of the step (DAPO, arXiv:2503.14476), the mean over answers of each one's mean (GRPO,
arXiv:2402.03300), the sum over answers x a constant length (Dr. GRPO, arXiv:2503.20783), or the mean over prompts of
the mean over all tokens of a prompt's answers (BNPO where a batch is a group).
"""


@dataclass(frozen=True)
class PolicyGradientSettings:
    """The loss of a token, and the divisor of the sum over tokens."""

    loss: PolicyLoss = "clip"
    ratio: RatioLevel = "token"
    clip_low: float = 0.2
    """The ratio is kept above 1 - clip_low (`clip`)."""
    clip_high: float = 0.2
    """The ratio is kept below 1 + clip_high (`clip`), or counts as clip_high at most (`cispo`)."""
    dual_clip: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """The temperatures of tokens with positive advantages, and of the others."""
    vespo_weights: tuple[GammaWeight, GammaWeight] = (GammaWeight(2.0, 3.0), GammaWeight(3.0, 2.0))
    """The weights of answers with advantages of at least 0, and of the others."""
    normalise: Normalise = "tokens"
    constant_tokens: int | None = None
    """The length that `normalise: constant` divides by: that of the longest answer there may be."""
    kl: float = 0.0
    """The coefficient of the KL to the reference as a term of the loss."""
    kl_estimator: KlEstimator = "k3"
    kl_with_ratio: bool = False
    """Whether the estimate is multiplied by the ratio, which gives it KL's gradient (DeepSeek-V3.2)."""
    entropy: float = 0.0
    """The coefficient of the entropy, a mean over all tokens of the step, that is taken from the loss."""
    importance: ImportanceBounds | None = None
    """How pi_old / mu of the engine's log-probabilities corrects the loss; None: not at all."""
    off_policy: float | None = None
    """The mean of log mu - log pi past which an answer with negative advantages is left out; None: never."""
    temperature: float = 1.0
    """The temperature at which answers were drawn, which divides logits."""
    single_update: bool = False
    """Whether each rollout is trained on once: the policy then is the one that drew, and the ratio exactly 1."""

    def __post_init__(self) -> None:
        assert self.normalise != "constant" or self.constant_tokens, "a constant length to divide by"
        by_token = self.importance is None or self.importance.level == "token"
        assert self.loss != "vespo" or by_token, "VESPO multiplies the weights of an answer's tokens itself"


@dataclass(frozen=True)
class PolicyGradient:
    """A policy gradient over answers that a rollout has drawn, scored and compared; a mean over the whole step.

    Items are trees: a prompt, and a branch for each answer. They have for every token the columns `sampled` (its
    log-probability under the distribution that it was drawn from), `old` (by the policy that the ratio is to),
    `advantage`, and `support` (the tokens that filters left, none where there were no filters: all); and for every
    answer the facts `group` (the number of its prompt, another one for each tree of a step), `reward` and each
    `reward/NAME` (NaN where it has none), `length`, `truncated`, and `fresh` (1 where its rollout has not been trained
    on yet). Branches that are no answer have NaN in all of them. An answer that goes on in further branches, behind a
    rewritten history, has its `length` in the first of them alone: it is one answer in every sum over answers and in
    every divisor.

    Policy and reference are both compared at the temperature of the rollout and within its support. Divisors count
    tokens and answers that carry weight: an answer that is masked as a whole is no answer. TRL 1.16 counts it among the
    sequences of `grpo`, `sapo` and `dr_grpo`, not among the tokens of `dapo`. A token that is left out by a mask that
    depends on log-probabilities (`off_policy`, `importance`) has a loss of 0 and stays in the divisor, as there; the KL
    to the reference is not masked.

    With teachers the loss has a term more: `divergence_weight` x the divergence from them over the whole vocabulary, a
    mean over the trained tokens of the step, of the policy as it is now and without a gradient through the drawing
    (GKD with a reward, arXiv:2306.13649, equation 5: a weight of alpha / (1 - alpha)). It is neither clipped nor
    masked.
    """

    settings: PolicyGradientSettings
    has_reference: bool = False
    divergence: TeacherDivergence | None = None
    divergence_weight: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Log-probabilities, of the policy and of the reference where there is one; with teachers the outputs that
        these need.
        """
        return frozenset({"logprobs"}) | (frozenset() if self.divergence is None else self.divergence.needs)

    @property
    def roles(self) -> frozenset[Role]:
        """The reference and the teachers, where there are any."""
        reference = frozenset({"reference"}) if self.has_reference else frozenset()
        return reference | (frozenset() if self.divergence is None else self.divergence.roles)

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """How many answers and groups of a step are trained, its fresh tokens, and how many answers have a reward."""
        return answer_counts(items)

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the micro-batch's tokens."""
        settings = self.settings
        drawn = self._drawn(outputs, batch)
        cost = _cost(settings, drawn)
        shares = batch.weights.double() * _token_factors(settings, batch, totals)
        total = (cost.losses * shares).sum()
        if settings.entropy:
            total = total - settings.entropy * (drawn.entropy * batch.weights).sum()
        with torch.no_grad():
            metrics = {**_token_metrics(settings, drawn, cost, batch, totals), **answer_metrics(batch)}
        if self.divergence is not None:
            divergence = (self.divergence(outputs) * batch.weights).sum()
            total = total + self.divergence_weight * divergence
            metrics["divergence"] = Metric(divergence.detach(), batch.weight)
        return Loss(total, metrics)

    def _drawn(self, outputs: Mapping[Role, Outputs], batch: Batch) -> _Drawn:
        settings, columns = self.settings, batch.columns
        policy = policy_logprobs(outputs["policy"], batch, settings.temperature)
        assert policy.entropy is not None and batch.branch is not None, "entropies of trees are asked for"
        reference = policy_logprobs(outputs["reference"], batch, settings.temperature) if self.has_reference else None
        old = policy.logprobs.detach() if settings.single_update else columns["old"]
        return _Drawn(
            policy.logprobs,
            policy.entropy if settings.entropy else policy.entropy.detach(),
            old,
            columns["sampled"],
            columns["advantage"],
            None if reference is None else reference.logprobs,
            _answers(batch),
        )


@dataclass(frozen=True)
class PolicyEvaluation:
    """Held-out answers are judged by their mean reward: the loss is its negative, NaN where no answer has a reward.

    The metrics are those of answers, and the entropy of the policy at each of their tokens.
    """

    temperature: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Log-probabilities, for the entropy that comes with them."""
        return frozenset({"logprobs"})

    @property
    def roles(self) -> frozenset[Role]:
        """No role in addition to the policy."""
        return frozenset()

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """How many answers have a reward."""
        samples = (sample for pack in items for sample in pack.samples)
        return {"rewards": float(sum(np.count_nonzero(~np.isnan(sample.facts["reward"])) for sample in samples))}

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The part of the mean reward that the micro-batch's answers are, without a gradient.

        totals: with its own divisors.
        """
        entropy = policy_logprobs(outputs["policy"], batch, self.temperature).entropy
        assert entropy is not None, "it is asked for"
        metrics = answer_metrics(batch)
        rewards = totals.divisors["rewards"]
        total = metrics["reward"].sum * (-totals.weight / rewards if rewards else float("nan"))
        return Loss(total, {"entropy": Metric((entropy.detach() * batch.weights).sum(), batch.weight), **metrics})


def policy_logprobs(model: Outputs, batch: Batch, temperature: float) -> TokenLogprobs:
    """Returns log-probabilities and entropies [N] under `model` of the distribution that the tokens were drawn from."""
    support = batch.columns.get("support")  # [N, K] int32, which indices may not be
    return model.logprobs(temperature=temperature, support=None if support is None else support.long(), entropy=True)


def answer_counts(items: Iterable[Pack]) -> dict[str, float]:
    """Counts a step's answers and groups with trained tokens, the weight of fresh tokens, and answers with a reward."""
    counts = {"answers": 0.0, "groups": 0.0, "fresh_tokens": 0.0, "rewards": 0.0}
    for sample in (sample for pack in items for sample in pack.samples):
        starts = [branch.start for branch in sample.branches]
        weights = np.add.reduceat(sample.weights.astype(np.float64), starts)  # [branches]
        facts = sample.facts
        answers = np.cumsum(~np.isnan(facts["length"]))  # [branches]; 0 is the stem
        counts["answers"] += float(np.count_nonzero(np.bincount(answers, weights)))
        counts["groups"] += float(len(np.unique(facts["group"][weights > 0])))
        counts["fresh_tokens"] += float(weights[facts["fresh"] == 1].sum())
        counts["rewards"] += float(np.count_nonzero(~np.isnan(facts["reward"])))
    return counts


def _answers(batch: Batch) -> Answers:
    """The answers of a micro-batch's tokens, each in one branch or several."""
    of_branches, count = _answers_of_branches(batch)
    assert batch.branch is not None, "the samples of this stage are trees"
    index = copy_to(of_branches, batch.branch.device)[batch.branch]  # [N]
    return Answers(index, count, batch.weights, partial(sum_over_ranks, batch=batch))


def _answers_of_branches(batch: Batch) -> tuple[Tensor, int]:
    """([branches] int64 on the host, the number of the answer that each is of; how many answers there are).

    A branch without a length goes on with the answer before it. So do stems, in which nothing is drawn.
    """
    begins = ~batch.facts["length"].isnan()
    return (begins.cumsum(0) - 1).clamp(min=0), max(1, int(begins.sum()))


def answer_metrics(batch: Batch) -> dict[str, Metric]:
    """The mean of each fact of answers that is shown, over those that have it: rewards, lengths, the truncated."""
    shown = ["length", "truncated", *(name for name in batch.facts if name.split("/")[0] == "reward")]
    own = counted(torch.arange(len(batch.trees)), batch)
    values = torch.stack([batch.facts[name][own].double() for name in shown])  # [facts, M], on the host
    counts = (~values.isnan()).sum(1).tolist()
    sums = copy_to(values.nansum(1).to(batch.weights.dtype), batch.weights.device)
    return {name: Metric(sum_, float(count)) for name, sum_, count in zip(shown, sums, counts, strict=True)}


@dataclass(frozen=True)
class _Drawn:
    """The models' values for the tokens of a micro-batch, and those recorded when they were drawn."""

    logprobs: Tensor  # [N] float32, like all; by the policy, with gradients
    entropy: Tensor  # [N], with gradients where they are wanted
    old: Tensor  # [N] log-probabilities by the policy that the ratio is to
    sampled: Tensor  # [N] by what they were drawn from: mu
    advantages: Tensor  # [N]
    reference: Tensor | None  # [N]
    answers: Answers


@dataclass(frozen=True)
class _Cost:
    """The loss of each token, and its factors."""

    losses: Tensor  # [N], with gradients
    ratio: Tensor  # [N]
    importance: Tensor | None  # [N], without gradients
    kept: Tensor | None  # [N] 0 where the off-policy mask leaves an answer out, else 1


def _cost(settings: PolicyGradientSettings, drawn: _Drawn) -> _Cost:
    answers, advantages = drawn.answers, drawn.advantages
    ratio = ratios(drawn.logprobs, drawn.old, answers, settings.ratio)
    importance = kept = None
    if settings.importance is not None:
        importance = importance_weights(drawn.old, drawn.sampled, answers, settings.importance)
    losses = _policy_losses(settings, drawn, ratio, importance)
    if settings.off_policy is not None:
        kept = off_policy_mask(drawn.logprobs, drawn.sampled, advantages, answers, settings.off_policy)
        losses = losses * kept
    if importance is not None and settings.loss != "vespo":
        losses = losses * importance
    if settings.kl:
        assert drawn.reference is not None, "a KL in the loss is one to a reference"
        kl = kl_estimate(drawn.logprobs, drawn.reference, settings.kl_estimator)
        losses = losses + settings.kl * (kl * ratio if settings.kl_with_ratio else kl)
    return _Cost(losses, ratio.detach(), importance, kept)


def _policy_losses(settings: PolicyGradientSettings, drawn: _Drawn, ratio: Tensor, importance: Tensor | None) -> Tensor:
    """[N]: the loss of each token, before masks and weights and without KL."""
    logprobs, advantages = drawn.logprobs, drawn.advantages
    match settings.loss:
        case "clip":
            bounds = {"low": settings.clip_low, "high": settings.clip_high}
            return clipped(ratio, advantages, **bounds, dual=settings.dual_clip)
        case "cispo":
            return cispo(ratio, logprobs, advantages, high=settings.clip_high)
        case "sapo":
            positive, negative = settings.sapo_temperatures
            return sapo(ratio, advantages, positive=positive, negative=negative)
        case "vespo":
            of_good, of_bad = settings.vespo_weights
            log_importance = None if importance is None else importance.log()
            return vespo(
                logprobs, drawn.old, advantages, drawn.answers,
                positive=of_good, negative=of_bad, log_importance=log_importance,
            )  # fmt: skip


def _token_factors(settings: PolicyGradientSettings, batch: Batch, totals: Totals) -> Tensor | float:
    """Returns the factor of each token's loss, [N] or one number, before the step divides by its weight."""
    assert batch.branch is not None, "the samples of this stage are trees"
    answers, groups = totals.divisors["answers"], totals.divisors["groups"]
    match settings.normalise:
        case "tokens":
            return 1.0
        case "constant":
            assert settings.constant_tokens is not None, "checked when the settings were made"
            return totals.weight / (answers * settings.constant_tokens)
        case "sequences":
            of_branches, count = _answers_of_branches(batch)
            index = copy_to(of_branches, batch.branch.device)[batch.branch]  # [N]
            return totals.weight / answers / _weight_of_own(index, count, batch)
        case "groups":
            numbers, group = batch.facts["group"].unique(return_inverse=True)  # on the host
            group = copy_to(group, batch.branch.device)[batch.branch]  # [N]
            return totals.weight / groups / _weight_of_own(group, len(numbers), batch)


def _weight_of_own(index: Tensor, count: int, batch: Batch) -> Tensor:
    """[N] float64: the weight of all tokens of the batch that have the same `index` [N] as each one."""
    sums = torch.zeros(count, dtype=torch.float64, device=index.device)
    return sum_over_ranks(sums.index_add(0, index, batch.weights.double()), batch)[index]


def _token_metrics(
    settings: PolicyGradientSettings, drawn: _Drawn, cost: _Cost, batch: Batch, totals: Totals
) -> dict[str, Metric]:
    """Means over tokens; the gap between trainer and engine is one over those that are fresh."""
    assert batch.branch is not None, "the samples of this stage are trees"
    logprobs, ratio = drawn.logprobs, cost.ratio
    by_token = ratios(logprobs, drawn.old, drawn.answers)
    shown = {
        "entropy": drawn.entropy,
        "advantage": drawn.advantages,
        "ratio": ratio,
        "approx_kl": by_token - 1 - (logprobs - drawn.old),  # k3 of KL(pi_old, pi)
        **_clip_metrics(settings, ratio, drawn.advantages),
    }
    if drawn.reference is not None:
        estimators: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
        shown |= {f"kl/{name}": kl_estimate(logprobs, drawn.reference, name) for name in estimators}
    if cost.importance is not None:
        shown["importance"] = cost.importance
    if cost.kept is not None:
        shown["off_policy"] = 1 - cost.kept
    metrics = {name: Metric((values * batch.weights).sum(), batch.weight) for name, values in shown.items()}
    # How many tokens are fresh the host knows of the step alone: a part of its mean, and shares that add up to 1.
    fresh = copy_to((batch.facts["fresh"] == 1).to(batch.weights.dtype), batch.branch.device)[batch.branch]
    gap = ((logprobs - drawn.sampled).abs() * fresh * batch.weights).sum()
    tokens = totals.divisors["fresh_tokens"]
    metrics["gap"] = Metric(gap / tokens, batch.weight / totals.weight) if tokens else Metric(gap, 0.0)
    return metrics


def _clip_metrics(settings: PolicyGradientSettings, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Returns [N] 0 or 1: tokens with a ratio at a bound, by bound; nothing for losses without bounds."""
    if settings.loss == "cispo":
        high = (ratio > settings.clip_high).to(ratio.dtype)
        return {"clip_high": high, "clip": high}
    if settings.loss != "clip":
        return {}
    low, high = clip_shares(ratio, advantages, low=settings.clip_low, high=settings.clip_high)
    shares = {"clip_low": low, "clip_high": high, "clip": low | high}
    if settings.dual_clip is not None:
        shares["clip_dual"] = (ratio > settings.dual_clip) & (advantages < 0)
    return {name: share.to(ratio.dtype) for name, share in shares.items()}
