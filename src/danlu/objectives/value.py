"""PPO: a policy gradient plus the loss of a head that predicts the return from each place.

N targets · D model width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from danlu.core.types import Batch, Loss, Metric, Outputs, Pack, Role, Totals
from danlu.objectives.policy import PolicyGradient
from danlu.objectives.policy_losses import value_loss


class PpoObjective(nn.Module):
    """The policy's loss plus `value_weight` times that of the values, a mean over the trained tokens of the step.

    A value is the head's output at the place that a token is predicted from. Items have the columns of a
    `PolicyGradient`, and for every token `value_old` (its value when it was drawn) and `return` (the target of values):
    see `advantages.generalized_advantages`.
    """

    def __init__(
        self,
        score: nn.Linear,
        policy: PolicyGradient,
        *,
        value_clip: float | None = 0.2,
        value_weight: float = 0.5,
        critic: Role = "policy",
    ) -> None:
        """critic: the role of the model with the hidden states that the head reads."""
        super().__init__()
        self.critic = critic
        self.score = score
        self.policy = policy
        self.value_clip = value_clip
        self.value_weight = value_weight

    @property
    def needs(self) -> frozenset[str]:
        """The model outputs that the policy gradient reads, and values."""
        return self.policy.needs | {"values"}

    @property
    def score_head(self) -> nn.Linear:
        """[1, D]: values of the critic's hidden states."""
        return self.score

    @property
    def roles(self) -> frozenset[Role]:
        """Those that the policy gradient asks, and the critic where it is not the policy."""
        return self.policy.roles | ({self.critic} - {"policy"})

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """Those of the policy gradient, and the squared deviations of returns from their mean, in sum."""
        packs = list(items)
        return {**self.policy.divisors(packs), "return_deviations": _squared_deviations(packs)}

    def forward(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the micro-batch's tokens."""
        loss = self.policy(outputs, batch, totals)
        values = outputs[self.critic].values()  # [N]
        old, returns = batch.columns["value_old"], batch.columns["return"]
        losses = value_loss(values, old, returns, clip=self.value_clip)
        value_total = (losses * batch.weights.double()).sum()
        with torch.no_grad():
            metrics = self._metrics(values, losses, batch, totals)
        return Loss(loss.total + self.value_weight * value_total, {**loss.metrics, **metrics})

    def _metrics(self, values: Tensor, losses: Tensor, batch: Batch, totals: Totals) -> dict[str, Metric]:
        """Returns means over tokens, the share of values that moved beyond the clip, and the explained variance of
        returns.

        The last is 1 - sum of (return - value)^2 / sum of (return - mean return)^2 over the step: 1 for a critic that
        is right, 0 for one that always says the mean. A constant error counts as not explained.
        """
        returns = batch.columns["return"]
        residuals = (returns - values).square()
        bounded = losses > 0.5 * residuals
        means = {"value": values, "value_loss": losses, "value_clip": bounded.to(losses.dtype)}
        metrics = {name: Metric((each * batch.weights).sum(), batch.weight) for name, each in means.items()}
        deviations, share = totals.divisors["return_deviations"], batch.weight / totals.weight
        unexplained = (residuals * batch.weights).sum()
        metrics["explained_variance"] = (
            Metric(share - unexplained / deviations, share) if deviations else Metric(unexplained * 0, 0.0)
        )
        return metrics


def _squared_deviations(packs: Sequence[Pack]) -> float:
    """The weighted sum over all trained tokens of (return - mean return)^2."""
    samples = [sample for pack in packs for sample in pack.samples]
    weights = np.concatenate([np.zeros(0), *(sample.weights for sample in samples)])
    returns = np.concatenate([np.zeros(0), *(sample.columns["return"] for sample in samples)])
    if not weights.any():
        return 0.0
    deviations = returns - np.average(returns, weights=weights)
    return float((weights * deviations * deviations).sum())
