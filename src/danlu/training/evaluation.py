"""Loss and metrics of the objective over held-out items: the same forward pass as training, without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from danlu.core.types import Item
from danlu.training.criterion import Criterion
from danlu.training.executor import AnyLearner, Executor
from danlu.training.learner import StepItems
from danlu.training.step import StepSums


@dataclass(frozen=True)
class Scores:
    """Means over the held-out items: the loss over trained weight, each metric over its own."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0

    @property
    def accuracy(self) -> float:
        """The share of targets that are the likeliest; KeyError for an objective that does not report it."""
        return self.metrics["accuracy"]

    @property
    def perplexity(self) -> float:
        """The perplexity, exp of the negative log-likelihood; KeyError for an objective that does not report it."""
        nll = self.metrics["nll"]
        return math.exp(nll) if nll < 700 else math.inf

    def values(self) -> dict[str, float]:
        """The evaluation's line in metrics.jsonl."""
        likelihood = {"perplexity": self.perplexity} if "nll" in self.metrics else {}
        others = {name: value for name, value in self.metrics.items() if name != "nll"}
        return {"loss": self.loss, **likelihood, **others, "tokens": self.tokens}

    def judged_by(self, criterion: Criterion) -> float:
        """The value that a run is judged by; NaN where no held-out item has weight for it."""
        return self.values().get(criterion.metric, math.nan)


@torch.no_grad()
def evaluate(
    learner: AnyLearner,
    items: Sequence[Item],
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> Scores | None:
    """Scores over all `items`; None when they have nothing to judge by, or when `stop` turned true on the way.

    Each process takes its share; all of them ask `stop` equally often. `progress` is called with (items done, items).
    """
    totals = learner.totals(items)
    if not totals.has_targets:
        return None
    micro_batches = learner.micro_batches(items)
    items = learner.prepare(items, micro_batches, None)
    sums, done = StepSums(), 0
    executor = Executor(learner, StepItems(items, micro_batches, totals), sums.add)
    for actions, numbers in learner.parallel.evaluation_rounds(len(micro_batches)):
        if stop():
            return None
        executor.run(actions)
        sums.fold()
        done += sum(len(micro_batches[number]) for number in numbers)
        progress(done, len(items))
    loss, metrics = sums.means(totals.weight, learner.parallel)
    learner.parallel.reshard()
    return Scores(loss, metrics, totals.tokens, totals.targets)
