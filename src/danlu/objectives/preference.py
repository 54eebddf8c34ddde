"""Losses over the log-probabilities of preferred and rejected answers, against those of a reference.

N targets · M branches · P pairs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F

from danlu.objectives.branches import CHOSEN, pairs_of, sum_by_branch
from danlu.types import Batch, Loss, Metric, Outputs, Pack, Role, Totals


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (arXiv:2305.18290, equation 7).

    With margin_p = sum over the tokens of the chosen answer of log pi/pi_ref, less the same of the rejected one:
    -(1 - s) log sigmoid(beta margin_p) - s log sigmoid(-beta margin_p), a mean over the pairs of the step.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        """Log-probabilities of policy and reference."""
        return frozenset({"logprobs"})

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """The pairs of a step."""
        return {"pairs": float(sum(_count(pack, CHOSEN) for pack in items))}

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the micro-batch's pairs."""
        chosen, rejected = pairs_of(batch)
        ratios = outputs["policy"].logprobs().logprobs - outputs["reference"].logprobs().logprobs  # [N]
        by_branch = sum_by_branch(ratios, batch)  # [M]
        margins = by_branch[chosen] - by_branch[rejected]  # [P]
        losses = -(1 - self.label_smoothing) * F.logsigmoid(self.beta * margins)
        losses = losses - self.label_smoothing * F.logsigmoid(-self.beta * margins)
        pairs = float(len(margins))
        rewards = self.beta * margins.detach()
        return Loss(
            losses.sum() * (totals.weight / totals.divisors["pairs"]),
            {
                "accuracy": Metric((rewards > 0).float().sum(), pairs),
                "margin": Metric(rewards.sum(), pairs),
            },
        )


def _count(pack: Pack, label: float) -> int:
    return sum(int((sample.facts["label"] == label).sum()) for sample in pack.samples)
