"""A model of this machine that makes data, by danlu's rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from danlu.core.errors import DataError
from danlu.data.prompt_encoding import encode_utf8
from danlu.inference import request as engine_requests
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.request import SamplingOptions
from danlu.inference.stepwise import StepwiseEngine
from danlu.production.synthesis.endpoint import without_thought
from danlu.production.synthesis.requests import Answered, Completion, Request, number_of

_PLACEHOLDER = "danlu-user-text"


@dataclass(frozen=True)
class _UnderWay:
    """A request with its prompt as text and as tokens."""

    request: Request
    text: str
    tokens: tuple[int, ...]


@dataclass
class LocalModel:
    """A model with its tokenizer.

    Draws follow from the keys of requests; that answers hang neither on what else is computed with them takes an engine
    with `exact`.

    Attributes:
        engine: made with the first request.
        stop_ids: tokens that end an answer.
        in_flight: requests that the engine has at a time.
    """

    name: str
    chat_tokenizer: ChatTokenizer
    make_engine: Callable[[], tuple[StepwiseEngine, frozenset[int]]]
    in_flight: int = 256

    @cached_property
    def _engine(self) -> tuple[StepwiseEngine, frozenset[int]]:
        return self.make_engine()

    @cached_property
    def user_header(self) -> str:
        """The text before a user's first turn by the chat template. Raises DataError without one."""
        return self._around_user[0]

    @cached_property
    def user_end(self) -> tuple[str, ...]:
        """The text behind a user's turn."""
        return (self._around_user[1],) if self._around_user[1] else ()

    @cached_property
    def _around_user(self) -> tuple[str, str]:
        self.chat_tokenizer.require_chat_template()
        turn = [{"role": "user", "content": _PLACEHOLDER}]
        before, _, behind = self.chat_tokenizer.render_chat(turn, begins_turn=False).partition(_PLACEHOLDER)
        return before, behind.strip()

    def check(self, top_logprobs: int) -> None:
        """Raises DataError for a tokenizer without a chat template."""
        self.chat_tokenizer.require_chat_template()

    def generate(self, requests: Iterable[Request]) -> Iterator[Answered]:
        """Every answer as soon as it is complete. Raises ResourceError for one that the cache cannot hold."""
        engine, stop_ids = self._engine
        waiting, under_way, number = iter(requests), dict[int, _UnderWay](), 0
        while True:
            while engine.unfinished < self.in_flight and (request := next(waiting, None)) is not None:
                number += 1
                under_way[number] = self._read(request)
                try:
                    engine.submit(self._engine_request(under_way[number], number, stop_ids))
                except DataError as error:  # a prompt that the model cannot continue
                    del under_way[number]
                    yield Answered(request, Completion("", "refused", detail=str(error)))
            if not engine.unfinished:
                return
            for answer in engine.step():
                asked = under_way.pop(answer.number)
                yield Answered(asked.request, self._completion(asked, answer))

    def drain(self) -> Iterator[Answered]:
        """Nothing: answers grow together, and those that are complete have been given."""
        return iter(())

    def close(self) -> None:
        """Forgets the engine."""
        self.__dict__.pop("_engine", None)

    def _read(self, request: Request) -> _UnderWay:
        tokenizer = self.chat_tokenizer.tokenizer
        if request.prompt is not None:  # its header has the beginning-of-text token
            return _UnderWay(request, request.prompt, tuple(tokenizer.encode(request.prompt)))
        text = self.chat_tokenizer.render_chat([message._asdict() for message in request.messages])
        return _UnderWay(request, text, tuple(encode_utf8(tokenizer, text)))

    def _engine_request(self, asked: _UnderWay, number: int, stop_ids: frozenset[int]) -> engine_requests.Request:
        request = asked.request
        silent, stops = self.chat_tokenizer.split_stops(request.stop)
        return engine_requests.Request(
            number,
            asked.tokens,
            SamplingOptions(temperature=request.temperature, top_p=request.top_p, seed=request.key.seed),
            request.max_new_tokens,
            stop_ids=stop_ids | silent,
            stop_strings=tuple(stops),
            top_logprobs=request.top_logprobs,
            draw_number=number_of(request.key) >> 1,
        )

    def _completion(self, asked: _UnderWay, answer: engine_requests.Completion) -> Completion:
        decode = self.chat_tokenizer.tokenizer.decode
        top = None
        if asked.request.top_logprobs:
            top = tuple(tuple((decode([token]), value) for token, value in each) for each in answer.top or ())
        return Completion(
            without_thought(answer.text, opened_by=asked.text),
            "length" if answer.is_truncated else "stop",
            len(asked.tokens),
            len(answer.tokens),
            top=top,
        )
