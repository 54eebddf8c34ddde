"""Asynchronous rollouts made again: each token is drawn with the weights that drew it when it was recorded.

Which weights drew which token followed from time, and is all that did: the draw itself follows from the request, the
tokens before it and the weights. So answers are let grow under each version as far as they grew then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from danlu.errors import CheckpointError
from danlu.rollout.embedded import EmbeddedEngine
from danlu.rollout.engine_state import completion_state, fresh_answer_state, request_from_json, request_to_json
from danlu.rollout.request import Completion, Request
from danlu.rollout.rollout_sampler import GREEDY_NUMBERS

if TYPE_CHECKING:
    from torch import Tensor

RunLengths = Sequence[Sequence[int]]
"""[(version, tokens), ...] of an answer, in the order of its tokens."""
_Key = tuple[int, int]


class RecordedEngine:
    """An `asynchronous.AsynchronousEngine`. What is not recorded does not come; greedy answers have one token.

    Args:
        engine: with the trainer's own tensors; asleep between calls.
        versions: by the number of a request and the sample.
    """

    def __init__(self, engine: EmbeddedEngine, versions: Mapping[_Key, RunLengths]) -> None:
        self._engine, self._versions = engine, versions
        self._requests: dict[int, Request] = {}
        self._answers: dict[_Key, dict[str, Any]] = {}  # states of unfinished ones
        self._complete: list[Completion] = []
        engine.sleep()

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Goes on with the trainer's present tensors, which are those of `version`."""
        self._engine.update(version)

    def submit(self, request: Request) -> None:
        """Takes a request whose answers are recorded; another is forgotten."""
        if request.number >= GREEDY_NUMBERS:
            own = [self._engine.version], ""
            self._complete.append(Completion(request.number, 0, [0], [0.0], [0.0], None, *own, "stop"))
            return
        for sample in range(request.samples):
            self._take(request, fresh_answer_state(sample))

    def receive(self, *, wait: bool) -> list[Completion]:
        """The answers that are complete under the present weights.

        Raises CheckpointError where that is none of those that are waited for, and where an answer has tokens of
        weights that are gone.
        """
        self._grow()
        complete, self._complete = self._complete, []
        if wait and not complete:
            raise CheckpointError(
                f"the answers that are trained on next are not recorded whole: none is complete with the weights of "
                f"{self._engine.version} updates"
            )
        return complete

    def state(self) -> dict[str, Any]:
        """Nothing: a replay writes no checkpoints."""
        return {"requests": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the answers of a checkpoint, as far as they are those that were trained on in the end."""
        self._answers, self._requests, self._complete = {}, {}, []
        for entry in state["requests"]:
            request = request_from_json(entry["request"])
            if request.number >= GREEDY_NUMBERS:
                self.submit(request)
                continue
            for answer in entry["answers"]:
                versions = _version_by_token(self._versions.get((request.number, answer["sample"]), ()))
                drawn = [row[4] for row in answer["drawn"]]
                # Else its process died, and it was drawn anew.
                is_same = drawn == versions[: len(drawn)]
                self._take(request, answer if is_same else fresh_answer_state(answer["sample"]))

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()

    def _take(self, request: Request, answer: dict[str, Any]) -> None:
        if (request.number, answer["sample"]) in self._versions:
            self._requests[request.number] = request
            self._answers[request.number, answer["sample"]] = answer

    def _grow(self) -> None:
        """Draws the tokens that are recorded with the present version."""
        limits: dict[_Key, int] = {}
        for key, answer in self._answers.items():
            if (limit := self._limit(key, answer)) is not None:
                limits[key] = limit
        growing = list(limits)
        if not growing:
            return
        entries = []
        for number, key in enumerate(growing):  # each as a request of its own, for each has a limit of its own
            own = self._requests[key[0]]
            request = replace(own, number=number, draw_number=own.random_number, max_new_tokens=limits[key])
            entries.append({"request": request_to_json(request), "answers": [self._answers[key]]})
        engine = self._engine
        engine.wake()
        try:
            engine.restore({"requests": entries})
            while engine.unfinished:
                for completion in engine.step():
                    self._take_grown(growing[completion.number], completion, limits)
        finally:
            engine.sleep()

    def _take_grown(self, key: _Key, completion: Completion, limits: Mapping[_Key, int]) -> None:
        request = self._requests[key[0]]
        tokens = len(completion.tokens)
        if completion.finish == "length" and tokens == limits[key] < request.max_new_tokens:
            self._answers[key] = completion_state(completion)
        else:
            self._complete.append(replace(completion, number=key[0]))
            del self._answers[key]

    def _limit(self, key: _Key, answer: Mapping[str, Any]) -> int | None:
        """Until how many tokens an answer grows with the present weights: as many as it may have, where they complete
        it; None where it does not.

        Raises CheckpointError where it lacks some of weights before these.
        """
        version, versions = self._engine.version, _version_by_token(self._versions[key])
        drawn = len(answer["drawn"])
        if drawn < len(versions) and versions[drawn] < version:
            raise CheckpointError(
                f"token {drawn} of sample {key[1]} of prompt {key[0]} was drawn with the weights of {versions[drawn]} "
                f"updates, and the replay has those of {version} already"
            )
        count = sum(1 for each in versions if each <= version)
        if count == len(versions):
            return self._requests[key[0]].max_new_tokens
        return count if count > drawn else None


def _version_by_token(run_lengths: RunLengths) -> list[int]:
    return [version for version, count in run_lengths for _ in range(count)]
