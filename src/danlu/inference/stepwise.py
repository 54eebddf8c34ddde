"""Engines that answer step by step: requests that were taken, unfinished answers, and complete ones."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from danlu.core.errors import DataError
from danlu.inference.answer import Answer
from danlu.inference.engine_state import request_from_json, request_to_json
from danlu.inference.grammar import Grammars
from danlu.inference.request import Completion, OnToken, Request
from danlu.inference.stopping import Decode
from danlu.models.config import ModelConfig


class StepwiseEngine(ABC):
    """The common part of engines of one process, which draw tokens by means of their own.

    context: the most tokens of a prompt and its answer. decode: token ids to text without special tokens. grammars:
    compile those of requests.
    """

    def __init__(
        self, config: ModelConfig, context: int, decode: Decode | None, grammars: Grammars | None = None
    ) -> None:
        self.decode, self.grammars = decode, grammars
        self._config, self._context = config, context
        self._live: dict[int, list[Answer]] = {}  # unfinished, by the request's number, in the order of arrival
        self._done: dict[tuple[int, int], Answer] = {}  # finished, and not yet returned
        self.is_paused = self.is_asleep = False

    @property
    def unfinished(self) -> int:
        """Answers that were asked for and that `step` has not returned."""
        return sum(map(len, self._live.values())) + len(self._done)

    def submit(
        self,
        request: Request,
        on_token: OnToken | None = None,
        *,
        decode: Decode | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Takes a request; its answers come with later steps.

        on_token: called with each token as soon as it is known. decode, grammars: in place of the engine's, for an
        adapter with a tokenizer of its own.

        Raises DataError and ResourceError for a request that the engine cannot answer.
        """
        decode = decode or self.decode
        grammars = grammars or self.grammars
        self._check(request, decode)
        _check_grammar(request, grammars)
        virtual = self._virtual_tokens(request.adapter)
        self._begin(
            [
                Answer(request, sample, virtual, self._context, decode, on_token, grammars)
                for sample in request.sample_numbers
            ]
        )

    def step(self) -> list[Completion]:
        """Goes on with the unfinished answers; returns those that are complete.

        After an error or an interruption all tokens are kept, and the next step goes on from them.
        """
        self._advance()
        return self._take_done()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns all answers to the requests, in their order and by sample. Raises the errors of `submit` and `step`;
        if a request is refused none has been taken."""
        assert not self.is_paused, "the engine is paused: resume it before it answers"
        for request in requests:
            self._check(request, self.decode)
            _check_grammar(request, self.grammars)
        numbers = [request.number for request in requests]
        if len(set(numbers)) < len(numbers):
            repeated = next(number for number in numbers if numbers.count(number) > 1)
            raise DataError(f"prompt {repeated}: two requests have this number. Give each its own")
        for request in requests:
            self.submit(request)
        keys = [(request.number, sample) for request in requests for sample in request.sample_numbers]
        expected, answers = set(keys), dict[tuple[int, int], Answer]()
        try:
            while not expected <= answers.keys():
                self._advance()
                answers |= self._done
                self._done = {}
            return [answers.pop(key).completion() for key in keys]
        finally:
            self._done = answers | self._done  # to other requests, or after an error

    def state(self) -> dict[str, Any]:
        """Unfinished requests with their answers so far, as JSON has it. To be read between two steps."""
        requests: dict[int, dict[str, Any]] = {}
        for answer in (*self._done.values(), *self._answers()):
            entry = requests.setdefault(answer.request.number, {"request": request_to_json(answer.request)})
            entry.setdefault("answers", []).append(answer.state())
        return {"requests": list(requests.values())}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the requests of another engine's `state`, and goes on where their answers ended."""
        for entry in state["requests"]:
            request = request_from_json(entry["request"])
            self._check(request, self.decode)
            _check_grammar(request, self.grammars)
            answers = []
            for answer_state in entry["answers"]:
                virtual = self._virtual_tokens(request.adapter)
                answer = Answer(
                    request, answer_state["sample"], virtual, self._context, self.decode, grammars=self.grammars
                )
                answer.restore(answer_state, self._config.vocab_size)
                answers.append(answer)
            self._begin(answers)

    @abstractmethod
    def _check(self, request: Request, decode: Decode | None) -> None:
        """Raises the errors of `submit`."""

    @abstractmethod
    def _begin(self, answers: Sequence[Answer]) -> None:
        """Takes the answers to one request, some of which may have tokens or be finished."""

    @abstractmethod
    def _advance(self) -> None:
        """Goes on with the unfinished answers; those that are complete are in `_done` afterwards."""

    def _virtual_tokens(self, adapter: str | None) -> tuple[int, ...]:
        """The tokens that every prompt of an adapter begins with."""
        return ()

    def _answers(self) -> Iterator[Answer]:
        """All that are unfinished, in the order of arrival."""
        return itertools.chain.from_iterable(self._live.values())

    def _finish(self, answer: Answer) -> None:
        """Moves an answer to those that are complete."""
        number = answer.request.number
        self._done[answer.key] = answer
        if unfinished := [other for other in self._live[number] if other is not answer]:
            self._live[number] = unfinished
        else:
            del self._live[number]

    def _check_number(self, number: int) -> None:
        """Raises DataError for a number that is in use."""
        if number in self._live or any(number == done for done, _ in self._done):
            raise DataError(f"prompt {number}: a request with this number is unfinished. Give each its own")

    def _take_done(self) -> list[Completion]:
        completions = [answer.completion() for answer in self._done.values()]
        self._done = {}  # Python runs no signal handler between here and the caller: what is taken is returned
        return completions


def _check_grammar(request: Request, grammars: Grammars | None) -> None:
    """Raises DataError for a grammar that no answer of this engine can follow."""
    if request.grammar is None:
        return
    if grammars is None:
        raise DataError(f"prompt {request.number}: this engine has no tokenizer, so answers can follow no grammar")
    grammars.compile(request.grammar)
