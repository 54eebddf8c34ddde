"""Rollout servers behind a process of their own: it hands them weights while training goes on, and asks them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from danlu.assembly.parallelize import Placed, Subject
from danlu.inference.engine_state import completion_state, fresh_answer_state, request_from_json, request_to_json
from danlu.inference.grammar import Grammars
from danlu.inference.request import Completion, Request
from danlu.inference.stopping import Decode
from danlu.parallel.parallel_context import ParallelContext
from danlu.recipe import Recipe
from danlu.stages.learner import trained_weights
from danlu.stages.served_policy import CANARY_PROMPTS, ServedPolicy

if TYPE_CHECKING:
    from torch import Tensor

WAIT_S = 0.05
"""Seconds that a step waits for an answer: weights and requests come in between."""


class ServedRollouts:
    """An engine of a rollout process (`rollout_worker.WorkerEngine`) that gets its answers from servers.

    Running requests go on while weights are replaced, and each token records the weights that drew it. Servers are
    given no more answers at a time than they have connections for, except a canary's: it is asked after each update,
    under weights that this process has a copy of.

    Args:
        subject: the policy, with weights that are replaced by those that come.
        decode, grammars: as `ServedPolicy` has them.

    Raises ResourceError where there is no server, ModelError where its answers could not be trusted.
    """

    def __init__(self, recipe: Recipe, subject: Subject, decode: Decode, grammars: Grammars | None = None) -> None:
        placed = Placed(subject, ParallelContext())
        self._policy = policy = ServedPolicy(recipe, placed, decode, grammars, step_s=WAIT_S)
        assert policy.engine is not None, "one process is the first"
        self._engine = policy.engine
        self._weights = trained_weights(subject.model, subject.adapters)
        self._most = max(1, self._engine.options.connections - CANARY_PROMPTS)
        self._requests: dict[int, Request] = {}  # that have not been answered whole
        self._waiting: deque[tuple[Request, list[dict[str, Any]]]] = deque()  # with answers so far; the engine has not
        self._complete: list[Completion] = []
        self._missing: dict[int, int] = {}  # answers of requests

    @property
    def unfinished(self) -> int:
        """Answers that were asked for and that `step` has not returned."""
        return sum(self._missing.values())

    def submit(self, request: Request) -> None:
        """Takes a request; its answers come with later steps."""
        self._take(request, [fresh_answer_state(sample) for sample in request.sample_numbers])

    def step(self) -> list[Completion]:
        """Waits a little for answers, and returns those that are complete.

        Raises DataError for a request that a server refuses, ResourceError where no server is left.
        """
        self._ask()
        self._receive()
        complete, self._complete = self._complete, []
        for completion in complete:
            self._missing[completion.number] -= 1
            if not self._missing[completion.number]:
                del self._missing[completion.number], self._requests[completion.number]
        return complete

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Hands servers new weights, and checks whether they answer with them. Running requests go on meanwhile.

        Raises TrainingError where they do not.
        """
        assert weights is not None, "weights come from another process"
        with torch.no_grad():
            for name, value in weights:
                self._weights[name].copy_(value)
        self._policy.update(version)
        self._policy.check_weights()

    def state(self) -> dict[str, Any]:
        """Unfinished requests with the tokens of their answers that have arrived, as JSON has it."""
        self._receive()
        entries: dict[int, dict[str, Any]] = {}

        def answers_of(number: int) -> list[Any]:
            request = request_to_json(self._requests[number])
            answers: list[Any] = entries.setdefault(number, {"request": request, "answers": []})["answers"]
            return answers

        for completion in self._complete:
            answers_of(completion.number).append(completion_state(completion))
        for entry in self._engine.state()["requests"]:
            answers_of(entry["request"]["number"]).extend(entry["answers"])
        for request, answers in self._waiting:
            answers_of(request.number).extend(answers)
        return {"requests": list(entries.values())}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the requests of another one's `state`."""
        for entry in state["requests"]:
            self._take(request_from_json(entry["request"]), entry["answers"])

    def close(self) -> None:
        """Has servers forget unfinished requests. The servers themselves go on."""
        self._policy.close()

    def _receive(self) -> None:
        if self._engine.unfinished:
            self._complete += self._policy.together(lambda engine: engine.step())

    def _take(self, request: Request, answers: list[dict[str, Any]]) -> None:
        self._requests[request.number] = request
        self._missing[request.number] = len(answers)
        self._waiting.append((request, answers))

    def _ask(self) -> None:
        """Gives the engine as many requests as there are connections for, in the order in which they were asked."""
        while self._waiting:
            request, answers = self._waiting[0]
            if self._engine.unfinished and self._engine.unfinished + len(answers) > self._most:
                return
            self._waiting.popleft()
            self._engine.restore({"requests": [{"request": request_to_json(request), "answers": answers}]})
