"""Requests answered from the journal or by a model, within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from danlu.core.errors import ResourceError
from danlu.production.synthesis.answerer import Answerer
from danlu.production.synthesis.journal import Journal, Spent
from danlu.production.synthesis.requests import Answered, Completion, Request


class BudgetSpent(ResourceError):
    """The budget is spent, and requests are left."""


@dataclass(frozen=True)
class Budget:
    """The most that all answers of a run may cost, earlier runs of the same command included; None: no bound.

    Requests that are under way when it is spent are waited for, and count.
    """

    tokens: float | None = None
    cost: float | None = None

    def is_spent(self, spent: Spent) -> bool:
        return (self.tokens is not None and spent.tokens >= self.tokens) or (
            self.cost is not None and spent.cost >= self.cost
        )


@dataclass
class Asking:
    """Asks the models of a run.

    Attributes:
        asked: requests that were not in the journal.
        used: what the answers that this run has used have cost, whoever asked for them; their sum hangs not on the
            order in which they came.
        progress: called with the answers of a step that are there, and all.
    """

    journal: Journal
    budget: Budget
    progress: Callable[[int, int], None] = lambda done, total: None
    asked: int = 0
    _used: list[Completion] = field(default_factory=list)

    @property
    def used(self) -> Spent:
        tokens, costs = sum(each.tokens for each in self._used), [each.cost for each in self._used]
        return Spent(len(self._used), tokens, math.fsum(costs))

    def answers(self, answerer: Answerer, requests: Sequence[Request], step: str) -> list[Answered]:
        """The answers to the requests of a step, in their order.

        Raises BudgetSpent where the budget ends before they do, and the errors of `Answerer.generate`; what has
        arrived is in the journal then.
        """
        assert len({request.key for request in requests}) == len(requests), "two requests have one key"
        answers = dict[str, Completion]()
        for request in requests:
            if (completion := self.journal.get(request, answerer.name)) is not None:
                answers[str(request.key)] = completion
        try:
            for answered in answerer.generate(self._remaining(requests, answers)):
                self.journal.append(answered.request, answerer.name, answered.completion)
                answers[str(answered.request.key)] = answered.completion
                self.progress(len(answers), len(requests))
        except KeyboardInterrupt:  # the process would wait for these answers anyway, and they are paid for
            for answered in answerer.drain():
                self.journal.append(answered.request, answerer.name, answered.completion)
            raise
        if len(answers) < len(requests):
            raise BudgetSpent(self._spent(step, len(answers), len(requests)))
        self._used += answers.values()
        return [Answered(request, answers[str(request.key)]) for request in requests]

    def _remaining(self, requests: Sequence[Request], answers: dict[str, Completion]) -> Iterator[Request]:
        """Yields the requests without an answer, until the budget is spent."""
        for request in [each for each in requests if str(each.key) not in answers]:
            if self.budget.is_spent(self.journal.spent):
                return
            self.asked += 1
            yield request

    def _spent(self, step: str, done: int, total: int) -> str:
        spent, bounds = self.journal.spent, list[str]()
        if self.budget.tokens is not None:
            bounds.append(f"{spent.tokens:,} of {self.budget.tokens:,.0f} tokens")
        if self.budget.cost is not None:
            bounds.append(f"{spent.cost:,.4g} of {self.budget.cost:,.4g} of money")
        return (
            f"budget: {' and '.join(bounds)} are spent, by {spent.answers:,} answers. {step} has {done:,} of "
            f"{total:,} answers, which are kept in {self.journal.path}. The same command with a larger budget goes on "
            "from there"
        )
