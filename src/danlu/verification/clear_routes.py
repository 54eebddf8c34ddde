"""The items of a verification of a model with experts, chosen so that rounding sends no token to another expert.

Among thousands of tokens some have two experts of almost one score, whatever the seed is; more so where scores are
sigmoids of small logits, which are all near a half. So items are chosen one by one, with the weights that the steps
before them have left: an item that has such a token is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from danlu.core.types import Item
from danlu.parallel.schedules import Action
from danlu.training.evaluation import evaluate
from danlu.training.executor import Executor
from danlu.training.learner import StepItems
from danlu.training.state import Run
from danlu.verification.data import ItemList
from danlu.verification.proxy import ProxyTraining
from danlu.verification.routes import LEAST_MARGIN, RoutingMargin
from danlu.verification.trace import of_no_step, trace_step


class ClearItems:
    """Chooses items while it takes the steps of a run in one process.

    Args:
        run: of `training`, before its first step.
        candidates: the items, in the order in which they are tried.
    """

    def __init__(self, training: ProxyTraining, run: Run, candidates: Sequence[Item]) -> None:
        self._training, self._run, self._candidates = training, run, candidates
        self._left = list(range(len(candidates)))
        self._taken: list[Item] = []
        run.data_loader.source = ItemList(self._taken)
        self.least_margin = float("inf")
        """The least margin of any route of a step that was taken."""

    def of_steps(self, count: int) -> list[int] | None:
        """The numbers of the items of the next `count` steps, which are taken; None where too few are clear."""
        chosen: list[int] = []
        for _ in range(count):
            with of_no_step(self._training.learner):
                numbers = self._clear(self._run.data_loader.per_step, self._margin_in_step)
            if numbers is None:
                return None
            self._taken += [self._candidates[number] for number in numbers]
            margin = RoutingMargin()
            with margin.watched():
                trace_step(self._training, self._run)
            self.least_margin = min(self.least_margin, margin.least)
            chosen += numbers
        return chosen

    def of_evaluation(self, count: int) -> list[int] | None:
        """The numbers of items that are judged with the weights as they are now; None where too few are clear."""
        with self._run.averaged():
            return self._clear(count, self._margin_in_evaluation)

    def _clear(self, count: int, margin_of: Callable[[list[Item], Item], float]) -> list[int] | None:
        """Takes the first `count` candidates that are clear after those before them; they are candidates no more."""
        numbers: list[int] = []
        for number in self._left:
            before = [self._candidates[other] for other in numbers]
            if margin_of(before, self._candidates[number]) >= LEAST_MARGIN:
                numbers.append(number)
            if len(numbers) == count:
                self._left = [other for other in self._left if other not in numbers]
                return numbers
        return None

    def _margin_in_step(self, before: list[Item], item: Item) -> float:
        """The margin of an item at its place in the next step, which decides its dropout."""
        learner, margin = self._training.learner, RoutingMargin()
        numbers = [[len(before)]]
        items = learner.prepare([*before, item], numbers, self._run.state.step + 1)
        step = StepItems(items, numbers, learner.totals(items), self._run.state.step + 1, 1.0)
        with margin.watched():
            Executor(learner, step).run([Action("forward", 0, 0)])
        return margin.least

    def _margin_in_evaluation(self, before: list[Item], item: Item) -> float:
        margin = RoutingMargin()
        with margin.watched():
            evaluate(self._training.learner, [item])
        return margin.least
