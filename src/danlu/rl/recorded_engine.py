"""Asynchronous rollouts made again: each token is drawn with the weights that drew it when it was recorded.

Which weights drew which token followed from time, and is all that did: the draw itself follows from the request, the
tokens before it and the weights. So answers are let grow under each version as far as they grew then. Environments are
asked again, and follow from the row, the seed and the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from danlu.core.errors import CheckpointError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine_state import completion_state, fresh_answer_state, request_from_json, request_to_json
from danlu.inference.request import Completion, Request
from danlu.rl.open_episode import TURN_NUMBERS
from danlu.rl.rollout_sampler import GREEDY_NUMBERS

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.rl.episode_engine import EpisodeEngine

RunLengths = Sequence[Sequence[int]]
"""[(version, tokens), ...] of an answer, in the order of its tokens."""
_Key = tuple[int, int]


class RecordedTurns:
    """A `rollout_worker.WorkerEngine`: a step lets answers grow as far as they grew under the present weights.

    Args:
        engine: with the trainer's own tensors; asleep between calls.
        versions: of each token, by the number of a request and the sample; of an episode those of all its turns.
    """

    def __init__(self, engine: EmbeddedEngine, versions: Mapping[_Key, Sequence[int]]) -> None:
        self._engine, self._versions = engine, versions
        self._requests: dict[_Key, Request] = {}
        self._answers: dict[_Key, dict[str, Any]] = {}  # states of unfinished ones
        self._taken_up: set[_Key] = set()  # of a checkpoint, and perhaps complete there
        self._tokens_before: Counter[_Key] = Counter()  # of an episode's turns that are complete
        engine.sleep()

    @property
    def version(self) -> int:
        """The version of the weights that the next token is drawn with."""
        return self._engine.version

    @property
    def unfinished(self) -> int:
        """Answers that a step would let grow. Raises CheckpointError as `step` does."""
        return sum(self._limit(key, answer) is not None for key, answer in self._answers.items())

    @property
    def is_stuck(self) -> bool:
        """Whether there is nothing that a step could go on with before there are other weights."""
        return self.unfinished == 0

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Goes on with the trainer's present tensors, which are those of `version`."""
        self._engine.update(version)

    def submit(self, request: Request) -> None:
        """Takes a request that has recorded answers."""
        for sample in request.sample_numbers:
            self._take(request, fresh_answer_state(sample))

    def step(self) -> list[Completion]:
        """Draws all tokens that are recorded with the present version; the answers that are complete with them.

        Raises CheckpointError where an answer has tokens of weights that are gone.
        """
        limits = {
            key: limit for key, answer in self._answers.items() if (limit := self._limit(key, answer)) is not None
        }
        growing = list(limits)
        if not growing:
            return []
        entries = []
        for number, key in enumerate(growing):  # each as a request of its own, for each has a limit of its own
            own = self._requests[key]
            request = replace(own, number=number, draw_number=own.random_number, max_new_tokens=limits[key])
            entries.append({"request": request_to_json(request), "answers": [self._answers[key]]})
        engine, complete = self._engine, list[Completion]()
        engine.wake()
        try:
            engine.restore({"requests": entries})
            while engine.unfinished:
                for completion in engine.step():
                    complete += self._take_grown(growing[completion.number], completion, limits)
        finally:
            engine.sleep()
        return complete

    def state(self) -> dict[str, Any]:
        """Nothing: a replay writes no checkpoints."""
        return {"requests": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes answers up where a checkpoint has them."""
        for entry in state["requests"]:
            for answer in entry["answers"]:
                key = self._take(request_from_json(entry["request"]), answer)
                if answer["drawn"]:
                    self._taken_up.add(key)

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()

    def _take(self, request: Request, answer: dict[str, Any]) -> _Key:
        key = _recorded_key(request.number, answer["sample"])
        self._requests[key], self._answers[key] = request, answer
        return key

    def _take_grown(self, key: _Key, completion: Completion, limits: Mapping[_Key, int]) -> list[Completion]:
        request = self._requests[key]
        tokens = len(completion.tokens)
        self._taken_up.discard(key)
        if completion.finish == "length" and tokens == limits[key] < request.max_new_tokens:
            self._answers[key] = completion_state(completion)
            return []
        del self._answers[key]
        self._tokens_before[key] += tokens
        return [replace(completion, number=request.number)]

    def _limit(self, key: _Key, answer: Mapping[str, Any]) -> int | None:
        """Returns the number of tokens up to which an answer grows with the present weights: the most that it may have,
        where they complete it; its present number, where it is not known yet whether they do; None where it does not
        grow.

        Raises CheckpointError where the answer lacks tokens of earlier weights.
        """
        version, versions, before = self.version, self._versions[key], self._tokens_before[key]
        drawn = len(answer["drawn"])
        if key in self._taken_up:  # what comes behind it may be those of a later turn
            return drawn
        if before + drawn < len(versions) and versions[before + drawn] < version:
            raise CheckpointError(
                f"token {before + drawn} of sample {key[1]} of prompt {key[0]} was drawn with the weights of "
                f"{versions[before + drawn]} updates, and the replay has those of {version} already"
            )
        count = sum(1 for each in versions if each <= version)
        if count == len(versions):
            return self._requests[key].max_new_tokens
        return count - before if count - before > drawn else None


class RecordedEngine:
    """An `asynchronous.AsynchronousEngine`. Answers that are not recorded never come; greedy answers have one token.

    Args:
        engine: with the trainer's own tensors.
        versions: by the number of a request and the sample.
        play: makes an engine of episodes over an engine that draws their turns; None: answers have one turn.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        versions: Mapping[_Key, RunLengths],
        play: Callable[[RecordedTurns], EpisodeEngine] | None = None,
    ) -> None:
        self._versions = {
            key: [version for version, count in run_lengths for _ in range(count)]
            for key, run_lengths in versions.items()
        }
        self._turns = RecordedTurns(engine, self._versions)
        self._answering: RecordedTurns | EpisodeEngine = self._turns if play is None else play(self._turns)
        self._complete: list[Completion] = []

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Goes on with the trainer's present tensors, which are those of `version`."""
        self._turns.update(version)

    def submit(self, request: Request) -> None:
        """Takes a request that has recorded answers; another is forgotten."""
        if request.number >= GREEDY_NUMBERS:
            own = [self._turns.version], ""
            self._complete.append(Completion(request.number, 0, [0], [0.0], [0.0], None, *own, "stop"))
        elif all((request.number, sample) in self._versions for sample in request.sample_numbers):
            self._answering.submit(request)

    def receive(self, *, wait: bool) -> list[Completion]:
        """The answers that are complete under the present weights.

        Raises CheckpointError where that is none of those that are waited for, and where an answer has tokens of
        weights that are gone.
        """
        complete, self._complete = self._complete, []
        while not self._answering.is_stuck:
            complete += self._answering.step()
        if wait and not complete:
            raise CheckpointError(
                f"the answers that are trained on next are not recorded whole: none is complete with the weights of "
                f"{self._turns.version} updates"
            )
        return complete

    def state(self) -> dict[str, Any]:
        """Nothing: a replay writes no checkpoints."""
        return {"requests": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the answers of a checkpoint, as far as they are those that were trained on in the end. Before
        anything else is asked."""
        for entry in state["requests"]:
            request = request_from_json(entry["request"])
            if request.number >= GREEDY_NUMBERS:
                self.submit(request)
                continue
            known = [answer for answer in entry["answers"] if (request.number, answer["sample"]) in self._versions]
            answers = [self._as_recorded(request.number, answer) for answer in known]
            if answers:
                self._answering.restore({"requests": [{"request": entry["request"], "answers": answers}]})

    def close(self) -> None:
        """Closes the engine, and the environments."""
        self._answering.close()

    def _as_recorded(self, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns an answer of a checkpoint; without its tokens where they differ from the recorded ones: then its
        process died, and it was drawn again."""
        turns = [answer] if "drawn" in answer else answer.get("answers", [])
        drawn = [row[4] for turn in turns for row in turn["drawn"]]
        is_same = drawn == self._versions[number, answer["sample"]][: len(drawn)]
        return answer if is_same else fresh_answer_state(answer["sample"])


def _recorded_key(number: int, sample: int) -> _Key:
    """The key by which an answer is recorded: a turn of an episode has that of the episode."""
    if number < TURN_NUMBERS:
        return number, sample
    return number % TURN_NUMBERS, number // TURN_NUMBERS - 1
