"""Losses of policy gradients, one value a token, as functions of log-probabilities and advantages.

Three policies take part: the one that is trained, the one that drew the tokens ("old": pi_old of the ratio), and the
reference that KL is measured to. A ratio is always to the policy that drew; where an engine's log-probabilities differ
from the trainer's by rounding, `importance_weights` corrects for it. Nothing is divided by a number of tokens here.

N tokens of a micro-batch, all of them drawn · M answers
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RatioLevel = Literal["token", "sequence"]
"""The level of the ratio: each token by itself (PPO, GRPO), or the geometric mean over its answer (GSPO,
arXiv:2507.18071).
"""
KlEstimator = Literal["k1", "k2", "k3"]

MOST_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut: exp(20) is 5e8, and no weight of a sample should be more."""


@dataclass(frozen=True)
class Answers:
    """The answer that each of N tokens belongs to, and the weights of the tokens."""

    index: Tensor  # [N] int64
    count: int  # M
    weights: Tensor  # [N] float32: 0 for a token that is not trained
    all_reduce: Callable[[Tensor], Tensor] = lambda x: x
    """The sum of [M] over the processes that have other tokens of the same answers: see `types.SharedBranches`."""

    def sum(self, values: Tensor) -> Tensor:
        """[M]: the weighted sum over the tokens of each answer."""
        weighted = values * self.weights.to(values.dtype)
        return self.all_reduce(values.new_zeros(self.count).index_add(0, self.index, weighted))

    def mean(self, values: Tensor) -> Tensor:
        """[M]: the weighted mean over the tokens of each answer; 0 where none counts."""
        total = self.sum(torch.ones_like(values))
        return self.sum(values) / total.clamp(min=torch.finfo(values.dtype).tiny)


def ratios(logprobs: Tensor, old: Tensor, answers: Answers, level: RatioLevel = "token") -> Tensor:
    """pi / pi_old of each token, [N], differentiable: exactly 1 where the policy is still the one that drew.

    Finite whatever the log-probabilities are, so that an advantage of 0 is nothing.

    By sequence it is exp(mean over the answer of log pi - log pi_old), the same for all tokens of an answer.
    """
    difference = logprobs - old
    if level == "sequence":
        difference = answers.mean(difference)[answers.index]
    return difference.clamp(max=MOST_LOG_RATIO).exp()


def clipped(
    ratio: Tensor, advantages: Tensor, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Tensor:
    """Computes -min(r A, clip(r, 1 - low, 1 + high) A) of each token (PPO, arXiv:1707.06347; two bounds: DAPO,
    2503.14476).

    dual: the most that a ratio counts in the unclipped term, above 1 + high: it bounds the loss of a token with a
    negative advantage (arXiv:1912.09729), as TRL's `delta`.
    """
    bounded = ratio.clamp(1 - low, 1 + high)
    unclipped = ratio if dual is None else ratio.clamp(max=dual)
    return -torch.minimum(unclipped * advantages, bounded * advantages)


def clip_shares(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Returns [N] bool each: tokens with a gradient that the lower bound stops, and those that the upper one stops."""
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, high: float = 5.0) -> Tensor:
    """-sg(min(r, high)) A log pi of each token (CISPO, arXiv:2506.13585): a clipped token still has a gradient.

    high: the bound itself, as TRL's epsilon_high and ScaleRL's epsilon_max are (arXiv:2510.13786), not its distance
    from 1.
    """
    return -ratio.clamp(max=high).detach() * advantages * logprobs


def sapo(ratio: Tensor, advantages: Tensor, *, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A of each token (SAPO, arXiv:2511.20347): a soft gate in place of the clip.

    positive, negative: tau for tokens with A > 0, and for the others. At r = 1 the gradient is that of r A.
    """
    temperature = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


@dataclass(frozen=True)
class GammaWeight:
    """VESPO's weight of an answer with the ratio w, phi(w) = exp(lambda (1 - w)) w^k (arXiv:2602.10693); phi(1) = 1."""

    shape: float
    """k."""
    rate: float
    """lambda."""

    def log(self, log_ratio: Tensor) -> Tensor:
        """log phi of log w [M]."""
        return self.rate + self.shape * log_ratio - self.rate * log_ratio.exp()


def vespo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    answers: Answers,
    *,
    positive: GammaWeight = GammaWeight(2.0, 3.0),
    negative: GammaWeight = GammaWeight(3.0, 2.0),
    log_importance: Tensor | None = None,
) -> Tensor:
    """-phi(w) A log pi of each token, w = the product of the answer's ratios, without a gradient of its own.

    log_importance: [N], log(pi_old / mu) where the engine's log-probabilities mu differ: it goes into w. Where w is not
    finite phi is 0.
    """
    with torch.no_grad():
        log_ratio = (logprobs - old).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        log_w = answers.sum(log_ratio)
        if log_importance is not None:
            log_w = log_w + answers.sum(log_importance.clamp(math.log(1e-8), MOST_LOG_RATIO))
        log_w = log_w.clamp(math.log(1e-8), MOST_LOG_RATIO)[answers.index]
        log_phi = torch.where(advantages >= 0, positive.log(log_w), negative.log(log_w))
        phi = log_phi.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -phi * advantages * logprobs


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """An estimate of KL(policy, reference) from each token that the policy drew, [N], in nats.

    With x = log pi_ref - log pi it is -x (k1), x^2 / 2 (k2) or e^x - x - 1 (k3), by Schulman's note "Approximating KL
    divergence". k1 and k3 have the KL as their mean, and k3 is never negative. As a term of the loss k2 has KL's
    gradient, and so has k3 where it is multiplied by the ratio (DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1).
    """
    x = reference - logprobs
    match estimator:
        case "k1":
            return -x
        case "k2":
            return 0.5 * x.square()
        case "k3":
            return x.exp() - x - 1


@dataclass(frozen=True)
class ImportanceBounds:
    """The correction for log-probabilities of another engine: w = pi_old / mu, mu being the engine's probability."""

    level: Literal["token", "sequence"] = "token"
    low: float | None = None
    """Weights below it are left out (IcePop's second bound, arXiv:2510.18855); TRL's truncation raises them to it."""
    high: float = 2.0
    masks: bool = False
    """Whether weights above `high` are left out, instead of truncated to it (TIS)."""


def importance_weights(old: Tensor, sampled: Tensor, answers: Answers, bounds: ImportanceBounds) -> Tensor:
    """Returns the factor of each token's loss where pi_old and the engine's mu differ, [N] without a gradient.

    By sequence w is the product over the answer's tokens.
    """
    with torch.no_grad():
        difference = (old - sampled).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        if bounds.level == "sequence":
            difference = answers.sum(difference).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)[answers.index]
        weights = difference.exp()
        outside = weights > bounds.high
        kept = torch.where(outside, 0.0, weights) if bounds.masks else weights.clamp(max=bounds.high)
        return kept if bounds.low is None else torch.where(weights < bounds.low, 0.0, kept)


def off_policy_mask(logprobs: Tensor, sampled: Tensor, advantages: Tensor, answers: Answers, most: float) -> Tensor:
    """[N] 0 or 1: leaves out answers with negative advantages that the policy has moved far from.

    Far is a mean of log mu - log pi above `most` (DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1).
    """
    with torch.no_grad():
        distance = answers.mean(sampled - logprobs)[answers.index]
        return ((advantages >= 0) | (distance <= most)).to(logprobs.dtype)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """(V - R)^2 / 2 of each token, or the larger of it and that of V kept within `clip` of V_old: PPO's critic, [N]."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (near - returns).square())


@dataclass
class AdaptiveKl:
    """A coefficient that keeps KL near a target (Ziegler et al., arXiv:1909.08593, sec. 2.2)."""

    coefficient: float
    target: float
    horizon: float = 10_000.0
    """Answers over which the coefficient changes by about e^0.2 at most."""

    def update(self, kl: float, answers: int) -> None:
        """Raises or lowers the coefficient after `answers` answers with a mean KL of `kl`, in nats an answer."""
        error = max(-0.2, min(0.2, kl / self.target - 1))
        self.coefficient *= 1 + error * answers / self.horizon
