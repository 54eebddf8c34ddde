"""Estimators: they turn rewards into advantages of tokens, columns that a rollout adds to its trees before training.

G prompts · M answers of all of them · R rewards of an answer · S tokens of a tree
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from danlu.core.types import Pack
from danlu.objectives.advantages import (
    Baseline,
    Scale,
    answer_advantages,
    combined_advantages,
    generalized_advantages,
    overlong_penalty,
    weighted_reward,
    whitened,
)
from danlu.objectives.policy_losses import AdaptiveKl, KlEstimator, kl_estimate
from danlu.rl.experience_trees import ADVANTAGE, OLD, with_columns
from danlu.rl.step_places import TokenRewards

REFERENCE, VALUE_OLD, RETURN = "reference", "value_old", "return"
"""Results of a pass without gradients: the reference's log-probabilities, and the columns of a critic."""
LAST_VALUE = "last_value"
"""[branches]: the critic's value after the last token of each branch."""


@dataclass(frozen=True)
class Judged:
    """A rollout with the rewards of its answers, in the order of its trees and their branches."""

    items: Sequence[Pack]
    rewards: np.ndarray  # [M, R] float64, NaN where there is none
    weights: Sequence[float]  # [R]
    groups: np.ndarray  # [M] int64, the number of the answer's tree among the items
    lengths: np.ndarray  # [M] int64, tokens
    truncated: np.ndarray  # [M] bool
    greedy_rewards: np.ndarray | None = None  # [G, R]
    token_scores: Sequence[Mapping[str, np.ndarray]] = ()  # of each item, [S] each
    branch_scores: Sequence[Mapping[str, np.ndarray]] = ()  # of each item, [branches] each
    step_rewards: Sequence[Mapping[int, TokenRewards]] = ()
    """The rewards of each answer's steps, by the number of the reward; they add up to that reward. Empty where no
    reward judges steps."""

    @property
    def total(self) -> Tensor:
        """[M] float64: the weighted sum of each answer's rewards, NaN where there is none."""
        return weighted_reward(torch.from_numpy(self.rewards), self.weights)

    def comparable(self) -> Judged:
        """The rollout in which an answer has no reward if its prompt's greedy answer should be compared with and has
        none."""
        if self.greedy_rewards is None:
            return self
        without = np.isnan(self.greedy_rewards).all(1)[self.groups]
        return replace(self, rewards=np.where(without[:, None], np.nan, self.rewards))

    def earned(self, answer: int) -> list[tuple[int, int, float]]:
        """Returns (number of the reward, place among the answer's tokens, reward) of each step; a reward without steps
        is given at the last token."""
        last, of_steps = int(self.lengths[answer]) - 1, list[tuple[int, int, float]]()
        steps = self.step_rewards[answer] if self.step_rewards else {}
        for part, value in enumerate(self.rewards[answer].tolist() if last >= 0 else ()):
            if part in steps:
                of_steps += [(part, *each) for each in zip(*(column.tolist() for column in steps[part]), strict=True)]
            elif not np.isnan(value):
                of_steps.append((part, last, value))
        return of_steps

    def masked(self, items: Sequence[Pack], *, truncated: bool) -> list[Pack]:
        """The items where answers without a reward, and perhaps those that were cut off, have no weight: they are not
        trained, and in no divisor."""
        missing = self.total.isnan().numpy()
        if truncated:
            missing |= self.truncated
        if not missing.any():
            return list(items)
        trained = []
        for number, item in enumerate(items):
            (sample,) = item.samples
            weights = sample.weights.copy()
            for answer, places in self.answers(number):
                if missing[answer]:
                    weights[places] = 0
            trained.append(Pack((replace(sample, weights=weights),)))
        return trained

    def answers(self, item: int) -> list[tuple[int, np.ndarray]]:
        """Returns (number among all answers, places [T] int64 of its drawn tokens) of each answer of an item."""
        (first, last), drawn = np.searchsorted(self.groups, [item, item + 1]), self.items[item].samples[0].weights > 0
        places, stops = np.flatnonzero(drawn), np.cumsum(self.lengths[first:last])
        assert not len(stops) or stops[-1] == len(places), "what was drawn has weight, and nothing else"
        return [
            (int(first) + number, places[stop - length : stop])
            for number, (length, stop) in enumerate(zip(self.lengths[first:last], stops, strict=True))
        ]

    def last_branches(self, item: int) -> list[int]:
        """The number of the branch that each answer of an item ends in, counted from the last one, -1."""
        branches = self.items[item].samples[0].branches
        starts = np.array([branch.start for branch in branches])
        return [
            int(np.searchsorted(starts, places[-1], side="right")) - 1 - len(branches) if len(places) else -1
            for _, places in self.answers(item)
        ]


@dataclass(frozen=True)
class RewardShaping:
    """Changes to rewards that are made before they are compared."""

    overlong_margin: int | None = None
    overlong_weight: float = 1.0
    max_new_tokens: int = 0
    masks_truncated: bool = False
    """Answers that were cut off count in baselines, and train nothing (arXiv:2503.14476, sec. 3.4)."""

    def shaped(self, judged: Judged) -> Judged:
        """The rewards with the overlong penalty as one more of them."""
        rewards, weights = judged.rewards.copy(), list(judged.weights)
        greedy = judged.greedy_rewards
        if self.overlong_margin is not None:
            penalty = overlong_penalty(torch.from_numpy(judged.lengths), self.max_new_tokens, self.overlong_margin)
            column = np.where(np.isnan(rewards).all(1), np.nan, penalty.numpy())
            rewards, weights = np.column_stack((rewards, column)), [*weights, self.overlong_weight]
            greedy = None if greedy is None else np.column_stack((greedy, np.zeros(len(greedy))))
        return replace(judged, rewards=rewards, weights=weights, greedy_rewards=greedy)


@dataclass
class KlPenalty:
    """Takes an estimate of each token's KL to the reference from its reward (arXiv:1909.08593)."""

    coefficient: AdaptiveKl
    adapts: bool
    estimator: KlEstimator = "k1"

    def paid(self, judged: Judged) -> tuple[list[np.ndarray], dict[str, float]]:
        """Computes the KL penalty of each token, [T] float64 for each answer, and metrics: an answer's mean KL in nats,
        and the coefficient.

        The mean is over answers that have a reward, and the coefficient of the next rollout is adapted to it.
        """
        of_answers, used = self._of_answers(judged), self.coefficient.coefficient
        given = ~judged.total.isnan().numpy()
        sums = np.array([of_answer.sum() for of_answer in of_answers])[given]
        mean = float(sums.mean()) if len(sums) else 0.0
        if self.adapts and len(sums):
            self.coefficient.update(mean, len(sums))
        return [used * of_answer for of_answer in of_answers], {"kl_in_reward": mean, "kl_coefficient": used}

    def _of_answers(self, judged: Judged) -> list[np.ndarray]:
        """[T] float64 of each answer: the estimate of each token in nats."""
        of_answers = []
        for number, (item, scores) in enumerate(zip(judged.items, judged.token_scores, strict=True)):
            columns = item.samples[0].columns
            policy, reference = (torch.from_numpy(x).double() for x in (columns[OLD], scores[REFERENCE]))
            estimate = kl_estimate(policy, reference, self.estimator).numpy()
            of_answers += [estimate[places] for _, places in judged.answers(number)]
        return of_answers


class Estimator(ABC):
    """Gives each token its advantage; an adaptive coefficient of KL is its state between rollouts."""

    columns: Sequence[str] = ()
    """The columns that it gives to items, float32."""
    facts: Sequence[str] = ()
    """The facts that it gives to their branches."""
    kl: KlPenalty | None = None

    @abstractmethod
    def estimate(self, judged: Judged) -> tuple[list[Pack], dict[str, float]]:
        """The items with their columns, and numbers about the rollout to be shown."""

    def state(self) -> dict[str, Any]:
        """The coefficient of KL, where it is in the reward."""
        return {} if self.kl is None else {"kl": self.kl.coefficient.coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        if self.kl is not None:
            self.kl.coefficient.coefficient = float(state["kl"])


@dataclass
class GroupEstimator(Estimator):
    """One advantage for all tokens of an answer, from the rewards of others: the family of GRPO.

    A KL in the reward is that of the whole answer, which is one action (RLOO, arXiv:2402.14740). With the baseline
    "batch" each token pays for its own and for later ones, and baseline and scale are over the tokens of the rollout
    (REINFORCE++, arXiv:2501.03262, equations 8 to 10).

    Rewards of steps count by their sum; with `process_supervision` by themselves (arXiv:2402.03300, section 4.1.3):
    each reward's steps of all answers to a prompt are normalised together, and a token has the sum of those that end
    with it or later. A reward without steps is a step that ends with the answer.
    """

    baseline: Baseline = "group"
    scale: Scale = "group"
    apart: bool = False
    shaping: RewardShaping = field(default_factory=RewardShaping)
    kl: KlPenalty | None = None
    process_supervision: bool = False
    columns = (ADVANTAGE,)

    def estimate(self, judged: Judged) -> tuple[list[Pack], dict[str, float]]:
        """Adds the column `advantage`."""
        judged, metrics = self.shaping.shaped(judged.comparable()), dict[str, float]()
        advantages: Sequence[np.ndarray]
        if self.process_supervision:
            advantages = self._by_step(judged)
        elif self.kl is None:
            advantages = self._by_answer(judged)
        else:
            paid, metrics = self.kl.paid(judged)
            advantages = (
                self._by_token(judged, paid) if self.baseline == "batch" else self._by_answer(_with_kl(judged, paid))
            )
        items = []
        for number, item in enumerate(judged.items):
            column = np.zeros(len(item.samples[0].tokens), np.float32)
            for answer, places in judged.answers(number):
                column[places] = advantages[answer]
            items.append(with_columns(item, {ADVANTAGE: column}))
        return judged.masked(items, truncated=self.shaping.masks_truncated), metrics

    def _by_step(self, judged: Judged) -> list[np.ndarray]:
        """Computes [T] float64 for each answer: the normalised rewards of each token's own and later steps, summed."""
        advantages = [np.zeros(length) for length in judged.lengths.tolist()]
        steps = [(answer, *step) for answer in range(len(advantages)) for step in judged.earned(answer)]
        for part, weight in enumerate(judged.weights):
            own = [(answer, place, value) for answer, of_part, place, value in steps if of_part == part]
            groups = torch.from_numpy(judged.groups[[answer for answer, _, _ in own]])
            values = torch.tensor([value for _, _, value in own], dtype=torch.float64)
            normalised = answer_advantages(values, groups, baseline=self.baseline, scale=self.scale).tolist()
            for (answer, place, _), value in zip(own, normalised, strict=True):
                advantages[answer][: place + 1] += weight * value
        return advantages

    def _by_token(self, judged: Judged, paid: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Computes [T] float64 for each answer: its reward less the penalties of each token and later ones, compared
        among all tokens."""
        returns = [
            total - of_answer[::-1].cumsum()[::-1] for total, of_answer in zip(judged.total.tolist(), paid, strict=True)
        ]
        advantages = answer_advantages(
            torch.from_numpy(np.concatenate(returns)),
            torch.from_numpy(np.repeat(judged.groups, judged.lengths)),
            baseline=self.baseline,
            scale=self.scale,
        )
        return [column.numpy() for column in advantages.split(judged.lengths.tolist())]

    def _by_answer(self, judged: Judged) -> list[np.ndarray]:
        """[] float64 of each answer: one for all its tokens."""
        greedy = judged.greedy_rewards
        advantages = combined_advantages(
            torch.from_numpy(judged.rewards),
            judged.weights,
            torch.from_numpy(judged.groups),
            apart=self.apart,
            baseline=self.baseline,
            scale=self.scale,
            greedy_rewards=None if greedy is None else torch.from_numpy(greedy[judged.groups]),
        )
        return list(advantages.numpy())


def _with_kl(judged: Judged, paid: Sequence[np.ndarray]) -> Judged:
    """Appends a reward: minus the sum of an answer's token penalties. A greedy answer has no penalty."""
    sums = np.array([of_answer.sum() for of_answer in paid])
    rewards = np.column_stack((judged.rewards, np.where(np.isnan(judged.rewards).all(1), np.nan, -sums)))
    greedy = judged.greedy_rewards
    greedy = None if greedy is None else np.column_stack((greedy, np.zeros(len(greedy))))
    return replace(judged, rewards=rewards, weights=[*judged.weights, 1.0], greedy_rewards=greedy)


@dataclass
class GaeEstimator(Estimator):
    """Advantages of tokens from a critic (GAE, arXiv:1506.02438): PPO. A reward is earned by the last token, those of
    steps by the tokens that end them."""

    discount: float = 1.0
    trace_decay: float = 0.95
    whitens: bool = True
    bootstraps_truncated: bool = True
    """Whether a truncated answer is worth the critic's value at the place where it was cut off."""
    shaping: RewardShaping = field(default_factory=RewardShaping)
    kl: KlPenalty | None = None
    columns = (ADVANTAGE, VALUE_OLD, RETURN)

    def estimate(self, judged: Judged) -> tuple[list[Pack], dict[str, float]]:
        """Computes the columns `advantage`, `return` and `value_old`."""
        judged, metrics = self.shaping.shaped(judged), dict[str, float]()
        paid = [np.zeros(length) for length in judged.lengths.tolist()]
        if self.kl is not None:
            paid, metrics = self.kl.paid(judged)
        terminal, rewards, values, last, offsets = judged.total.numpy(), [], [], [], [0]
        for number, scores in enumerate(judged.token_scores):
            of_branches = judged.branch_scores[number][LAST_VALUE]  # without the stem's, where prompts are repeated
            branches = judged.last_branches(number)
            for (answer, places), branch in zip(judged.answers(number), branches, strict=True):
                earned = -paid[answer]
                for part, place, reward in judged.earned(answer):
                    earned[place] += judged.weights[part] * reward
                rewards.append(earned)
                values.append(scores[VALUE_OLD][places].astype(np.float64))
                goes_on = self.bootstraps_truncated and judged.truncated[answer]
                last.append(float(of_branches[branch]) if goes_on else 0.0)
                offsets.append(offsets[-1] + len(places))
        advantages, returns = generalized_advantages(
            torch.from_numpy(np.concatenate(rewards)),
            torch.from_numpy(np.concatenate(values)),
            torch.tensor(last, dtype=torch.float64),
            offsets,
            discount=self.discount,
            trace_decay=self.trace_decay,
        )
        unscored = np.repeat(np.isnan(terminal), np.diff(offsets))
        weights = torch.from_numpy(~unscored).double()
        advantages = whitened(advantages, weights) if self.whitens else advantages * weights
        items = self._with_columns(judged, advantages.numpy(), returns.numpy())
        return judged.masked(items, truncated=self.shaping.masks_truncated), metrics

    def _with_columns(self, judged: Judged, advantages: np.ndarray, returns: np.ndarray) -> list[Pack]:
        items, place = [], 0
        for number, item in enumerate(judged.items):
            drawn = item.samples[0].weights > 0
            count = int(drawn.sum())
            columns = {name: np.zeros(len(drawn), np.float32) for name in (ADVANTAGE, RETURN)}
            columns[ADVANTAGE][drawn] = advantages[place : place + count]
            columns[RETURN][drawn] = returns[place : place + count]
            place += count
            value_old = judged.token_scores[number][VALUE_OLD].astype(np.float32)
            items.append(with_columns(item, {**columns, VALUE_OLD: value_old}))
        return items


@dataclass
class TeacherAdvantages(Estimator):
    """Another estimator's advantages, and each token's own from teachers: weight x (log q - log p).

    q is a teacher and p the policy that drew, at the temperature and within the support of the rollout; of several
    teachers it is the mean by their shares. In the mean over draws that is the gradient of the reverse KL from the
    policy to the teachers at each place, as if nothing came after a token: the on-policy distillation of Thinking
    Machines (https://thinkingmachines.ai/blog/on-policy-distillation), combined with rewards. It is added after
    advantages are normalised, and not normalised itself.
    """

    estimator: Estimator
    shares: Mapping[str, float]
    """The share of each teacher, by its role, which names its log-probabilities among the scores of tokens."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.columns, self.facts = self.estimator.columns, self.estimator.facts

    def estimate(self, judged: Judged) -> tuple[list[Pack], dict[str, float]]:
        """The other's items with larger advantages where teachers find a token likelier; `reverse_kl` is the mean of
        log p - log q over the tokens that are trained, in nats."""
        items, metrics = self.estimator.estimate(judged)
        advised, total, weight = [], 0.0, 0.0
        for item, scores in zip(items, judged.token_scores, strict=True):
            sample = item.samples[0]
            policy = sample.columns[OLD].astype(np.float64)
            ratios = [share * (scores[role].astype(np.float64) - policy) for role, share in self.shares.items()]
            ratio = np.where(sample.weights > 0, np.sum(ratios, axis=0), 0.0)  # [S] log q - log p
            total, weight = total - float((ratio * sample.weights).sum()), weight + float(sample.weights.sum())
            advantage = sample.columns[ADVANTAGE] + self.weight * ratio
            advised.append(with_columns(item, {ADVANTAGE: advantage.astype(np.float32)}))
        return advised, {**metrics, **({"reverse_kl": total / weight} if weight else {})}

    def state(self) -> dict[str, Any]:
        """Returns the state of the other estimator."""
        return self.estimator.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        self.estimator.restore(state)
