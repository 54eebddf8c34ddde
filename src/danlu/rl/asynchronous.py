"""Asynchronous rollouts: answers are drawn while the trainer works, under weights that are replaced while they grow.

Prompts are asked in their order, and a rollout has the same prompts that it would have synchronously, however long
their answers take: no answer is dropped for being slow, so the answers that are trained on are distributed as those of
the policy are. The age of an answer is bounded by when its prompt is asked (`rollouts_admitted`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from danlu.core.errors import DanluError
from danlu.inference.engine_state import completion_state, request_from_json, request_to_json, request_with_source
from danlu.inference.request import Completion, Request
from danlu.parallel.comm import Group
from danlu.parallel.process_group import from_first_untimed

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.data.prompts import Prompt

    Weights = Iterable[tuple[str, Tensor]]

T = TypeVar("T")


def rollouts_admitted(updates: int, updates_per_rollout: int, staleness: int) -> int:
    """The number of rollouts of a run that may have begun after `updates` updates of the policy.

    Rollout r is trained on from update r x updates_per_rollout on. It may begin `staleness` updates before that.
    """
    return (updates + staleness) // updates_per_rollout + 1


class AsynchronousEngine(Protocol):
    """Answers requests while its caller does something else. Not safe for several threads at once.

    All methods raise the errors of answering: DanluErrors of the engine, TrainingError where it cannot go on.
    """

    def update(self, version: int, weights: Weights) -> None: ...

    # Goes on with other weights, before what is submitted afterwards; unfinished answers keep what they have.

    def submit(self, request: Request) -> None: ...

    def receive(self, *, wait: bool) -> list[Completion]: ...  # complete since the last call; wait: until one is

    def state(self) -> dict[str, Any]: ...  # as `RolloutEngine.state`, of what `receive` has not returned

    # In place of all requests, each with its `source` where it has one; goes on with the next update.
    def restore(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass
class AsynchronousRollouts:
    """The requests of rollouts to come. All processes make the same calls; the first has the engine.

    Args:
        engine: None on other processes than the first.
        weights: the policy's present weights, by the names of the engine's model. All processes go through them
            together; on others than the first there may be none.
        staleness: how many updates a rollout may begin before it is trained on.
        rollouts: of the whole run: none is begun after them. None: as many as there are steps for.
        source: returns the prompt of a request by its number, where an environment answers back; states do not hold it.
    """

    engine: AsynchronousEngine | None
    weights: Callable[[], Weights]
    staleness: int
    world: Group
    rollouts: int | None = None
    source: Callable[[int], Prompt] | None = None
    asked: int = 0
    """Prompts of the run with a lower number have been asked."""
    _updates: int | None = None  # of the weights that the engine has
    _requests: dict[int, Request] = field(default_factory=dict)  # submitted and not taken
    _complete: dict[tuple[int, int], Completion] = field(default_factory=dict)  # on the first process
    _taken: set[int] = field(default_factory=set)  # numbers of requests

    def publish(self, updates: int) -> None:
        """Has the engine go on with the policy's weights, which have had so many updates; at once if it has them."""
        if updates == self._updates:
            return
        error: DanluError | None = None
        weights = iter(self.weights())
        try:
            if self.engine is not None:
                self.engine.update(updates, weights)
        except DanluError as problem:
            error = problem
        for _ in weights:  # the others are in it too
            pass
        self._together(lambda: _raise(error))
        self._updates = updates

    def rollouts_to_begin(self, updates_per_rollout: int) -> int:
        """The number of rollouts of the run that may have begun under the present weights."""
        assert self._updates is not None, "weights are published first"
        admitted = rollouts_admitted(self._updates, updates_per_rollout, self.staleness)
        return admitted if self.rollouts is None else min(admitted, self.rollouts)

    def submit(self, requests: Sequence[Request]) -> None:
        """Asks; the answers are there to be taken later. Raises as the engine does."""
        self._requests |= {request.number: request for request in requests}

        def submit() -> None:
            assert self.engine is not None, "the first process has the engine"
            for request in requests:
                self.engine.submit(request)

        if requests:
            self._together(submit)

    def poll(self) -> None:
        """Takes the complete answers from the engine, without waiting."""
        if self.engine is not None:
            self._keep(self.engine.receive(wait=False))

    def take(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers to requests that were submitted, in their order and by sample, as soon as all are there.

        They stay in `state` until `forget_taken`, since their caller may fail.
        """
        keys = [(request.number, sample) for request in requests for sample in range(request.samples)]

        def collect() -> list[Completion]:
            assert self.engine is not None, "the first process has the engine"
            while any(key not in self._complete for key in keys):
                self._keep(self.engine.receive(wait=True))
            return [self._complete[key] for key in keys]

        completions = self._together(collect)
        self._taken |= {request.number for request in requests}
        return completions

    def forget_taken(self) -> None:
        """Drops the taken answers from `state`; the caller keeps them."""
        for number in self._taken:
            request = self._requests.pop(number)
            for sample in range(request.samples):
                self._complete.pop((number, sample), None)
        self._taken = set()

    def state(self) -> dict[str, Any]:
        """Returns the requests that were asked and not taken, with their answers so far, as JSON."""
        return {"asked": self.asked, "requests": self._together(self._request_states)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes `state` up in place of all that was asked."""
        requests = [request_from_json(entry["request"]) for entry in state["requests"]]
        if self.source is not None:
            requests = [replace(request, source=self.source(request.number)) for request in requests]
        self._requests = {request.number: request for request in requests}
        self.asked, self._updates, self._complete, self._taken = int(state["asked"]), None, {}, set()

        def restore() -> None:
            assert self.engine is not None, "the first process has the engine"
            entries = zip(requests, state["requests"], strict=True)
            self.engine.restore(
                {
                    "requests": [
                        {"request": request_with_source(request), "answers": entry["answers"]}
                        for request, entry in entries
                    ]
                }
            )

        self._together(restore)

    def close(self) -> None:
        """Ends the engine. Unfinished requests are gone."""
        if self.engine is not None:
            self.engine.close()

    def _request_states(self) -> list[dict[str, Any]]:
        """Entries as in an engine's state, of complete answers too, in the order in which they were asked."""
        assert self.engine is not None, "the first process has the engine"
        engine_state = self.engine.state()
        answers: dict[int, list[dict[str, Any]]] = {number: [] for number in self._requests}
        for completion in self._complete.values():
            answers[completion.number].append(completion_state(completion))
        for entry in engine_state["requests"]:
            answers[entry["request"]["number"]] += entry["answers"]
        return [
            {
                "request": request_to_json(request),
                "answers": sorted(answers[number], key=lambda answer: int(answer["sample"])),
            }
            for number, request in self._requests.items()
        ]

    def _keep(self, completions: Iterable[Completion]) -> None:
        self._complete |= {(completion.number, completion.sample): completion for completion in completions}

    def _together(self, make: Callable[[], T]) -> T:
        return from_first_untimed(self.world, make, "asynchronous")


def _raise(error: DanluError | None) -> None:
    if error is not None:
        raise error
