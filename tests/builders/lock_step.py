"""An engine for asynchronous rollouts that makes so many passes an update, so that a test knows who draws what when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from danlu.inference.request import Completion, Request
from danlu.rl.rollout_worker import WorkerEngine


class LockStepEngine:
    """An `AsynchronousEngine` over one in this process; who waits has it make passes until an answer is complete.

    passes: after each update, over and over.
    """

    def __init__(self, engine: WorkerEngine, passes: Sequence[int] = (3,)) -> None:
        self.engine = engine
        self.passes = itertools.cycle(passes)
        self.left = 0
        self.received: list[Completion] = []
        self.submitted: list[int] = []
        self.has_weights = False

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.update(version, [(name, value.clone()) for name, value in weights])
        self.left, self.has_weights = next(self.passes), True

    def submit(self, request: Request) -> None:
        self.submitted.append(request.number)
        self.engine.submit(request)

    def receive(self, *, wait: bool) -> list[Completion]:
        assert self.has_weights, "an answer would be drawn with weights that nobody has handed over"
        while self.left > 0 or (wait and not self.received):
            self.left -= 1
            self.received += self.engine.step()
        received, self.received = self.received, []
        return received

    def state(self) -> dict[str, Any]:
        return self.engine.state()

    def restore(self, state: dict[str, Any]) -> None:
        assert self.engine.unfinished == 0 and not self.received, "tests begin with an engine that has nothing to do"
        self.engine.restore(state)
        self.has_weights = False

    def close(self) -> None:
        self.engine.close()
