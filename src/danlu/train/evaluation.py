"""Loss, perplexity and token accuracy over held-out packs: the same forward as training, without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from danlu.recipe.sections import LossOptions
from danlu.train.step import Learner
from danlu.types import Item


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
def evaluate(compute: Learner, packs: Iterable[Item], *, stop: Callable[[], bool] = lambda: False) -> Scores | None:
    """Scores over all `packs`; None when there is no trained token, or when `stop` turned true on the way.

    Of many processes each takes its share; all of them ask `stop` equally often.
    """
    sums = torch.zeros(5, dtype=torch.float64)  # nll, correct, weight, tokens, trained
    for group in _groups(packs, compute.micro) if compute.parallel.alone else _own_groups(compute, list(packs)):
        if stop():
            return None
        batch = compute.collate(group)
        entropy = compute.losses(batch, LossOptions())
        counts = torch.tensor([batch.weight, sum(pack.tokens for pack in group), len(batch.targets)])
        sums += torch.cat((torch.stack((entropy.nll, entropy.correct)).double().cpu(), counts.double()))
    nll, correct, weight, tokens, trained = compute.parallel.all_reduce_data(sums).tolist()
    compute.parallel.reshard()
    if not weight:
        return None
    return Scores(loss=nll / weight, accuracy=correct / weight, tokens=int(tokens), trained_tokens=int(trained))


def _groups(packs: Iterable[Item], size: int) -> Iterator[list[Item]]:
    packs = iter(packs)
    while group := list(islice(packs, size)):
        yield group


def _own_groups(compute: Learner, packs: list[Item]) -> Iterator[list[Item]]:
    """As many on each process; where others have packs left, one has none."""
    own, size = compute.parallel.local_range(packs), compute.micro
    for number in range(compute.parallel.num_micro_batches(len(packs), size)):
        yield [packs[place] for place in own[number * size : (number + 1) * size]]
