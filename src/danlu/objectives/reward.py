"""Losses over a score head's output at the last token of each branch: outcome and process reward models.

M branches · P pairs · D model width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.device_moves import copy_to
from danlu.core.types import Batch, Loss, Metric, Outputs, Pack, Role, Totals
from danlu.objectives.branches import CHOSEN, counted, pairs_of


class BradleyTerry(nn.Module):
    """The likelihood that the preferred answer wins (arXiv:2203.02155, equation 1), a mean over the pairs of the step.

    With scores r_c and r_r of the chosen and the rejected answer: -log sigmoid(r_c - r_r - margin) + centring
    (r_c + r_r)^2. The margin (arXiv:2307.09288, equation 2) is 0 in rows that have none; TRL asks all rows for one.
    """

    needs = frozenset({"scores"})

    def __init__(self, score: nn.Linear, centring: float = 0.0) -> None:
        super().__init__()
        self.score = score
        self.centring = centring

    @property
    def score_head(self) -> nn.Linear:
        """[1, D], without a bias, which no difference of scores depends on."""
        return self.score

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """The pairs of a step."""
        labels = (sample.facts["label"] for pack in items for sample in pack.samples)
        return {"pairs": float(sum((label == CHOSEN).sum() for label in labels))}

    def forward(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the micro-batch's pairs."""
        chosen, rejected = (counted(answers, batch) for answers in pairs_of(batch))
        scores = outputs["policy"].scores()  # [M]
        of_chosen, of_rejected = scores[chosen], scores[rejected]  # [P]
        margins = of_chosen - of_rejected
        demanded = copy_to(batch.facts["margin"].nan_to_num(0.0), scores.device)[chosen]
        losses = F.softplus(demanded - margins) + self.centring * (of_chosen + of_rejected).square()
        return Loss(
            losses.sum() * (totals.weight / max(totals.divisors["pairs"], 1.0)),
            {
                "accuracy": _mean((margins > 0).float()),
                "margin": _mean(margins),
                "chosen_score": _mean(of_chosen),
                "rejected_score": _mean(of_rejected),
            },
        )


class Stepwise(nn.Module):
    """Whether each step of an answer is right (arXiv:2305.20050), a mean over a training step's labelled ones.

    The binary cross-entropy over two labels at the last token of each labelled step, that of the separator behind it
    where there is one, as TRL's PRMTrainer (until 1.0) has it with transformers' token classification. That takes a
    mean over the labelled tokens of each micro-batch.
    """

    needs = frozenset({"scores"})

    def __init__(self, score: nn.Linear) -> None:
        super().__init__()
        self.score = score

    @property
    def score_head(self) -> nn.Linear:
        """[2, D] with a bias: row 1 says that a step is right."""
        return self.score

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        """The labelled steps of answers in a training step."""
        labels = (sample.facts["label"] for pack in items for sample in pack.samples)
        return {"steps": float(sum((label == label).sum() for label in labels))}  # NaN equals nothing

    def forward(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the micro-batch's labelled steps."""
        label = batch.facts["label"]  # [M], on the host
        labelled = counted((~label.isnan()).nonzero().squeeze(1), batch)
        scores = outputs["policy"].scores()  # [M, 2]
        wanted = copy_to(label[labelled].long(), scores.device)  # [steps]
        said = scores[copy_to(labelled, scores.device)]  # [steps, 2]
        total = F.cross_entropy(said, wanted, reduction="sum")
        return Loss(
            total * (totals.weight / max(totals.divisors["steps"], 1.0)),
            {"accuracy": _mean((said.argmax(1) == wanted).float()), "right_steps": _mean(wanted.float())},
        )


def _mean(values: Tensor) -> Metric:
    return Metric(values.detach().sum(), float(len(values)))
