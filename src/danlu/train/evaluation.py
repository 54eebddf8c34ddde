"""Loss, perplexity and token accuracy over held-out packs: the same forward as training, without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from danlu.recipe.sections import LossOptions
from danlu.train.step import Compute, cross_entropy
from danlu.types import Pack


@dataclass(frozen=True)
class Scores:
    """Means over trained weight; perplexity is exp(loss). Label smoothing and z-loss take no part."""

    loss: float
    accuracy: float
    tokens: int
    trained_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def values(self) -> dict[str, float]:
        return {"loss": self.loss, "perplexity": self.perplexity, "accuracy": self.accuracy, "tokens": self.tokens}


@torch.no_grad()
def evaluate(compute: Compute, packs: Iterable[Pack], *, stop: Callable[[], bool] = lambda: False) -> Scores | None:
    """Scores over all `packs`; None when there is no trained token, or when `stop` turned true on the way."""
    sums = torch.zeros(2, dtype=torch.float64, device=compute.device)
    weight = 0.0
    tokens = trained = 0
    for group in _groups(packs, compute.micro):
        if stop():
            return None
        batch = compute.collate(group)
        entropy = cross_entropy(compute, batch, LossOptions())
        sums += torch.stack((entropy.nll, entropy.correct))
        weight += batch.weight
        tokens += sum(pack.tokens for pack in group)
        trained += len(batch.targets)
    if not weight:
        return None
    nll, correct = (sums / weight).tolist()
    return Scores(loss=nll, accuracy=correct, tokens=tokens, trained_tokens=trained)


def _groups(packs: Iterable[Pack], size: int) -> Iterable[list[Pack]]:
    group: list[Pack] = []
    for pack in packs:
        group.append(pack)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
