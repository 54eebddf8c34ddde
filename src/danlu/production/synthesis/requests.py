"""Requests to a model that makes data, its completions, and random numbers that follow from a request's key alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

Item = TypeVar("Item")

Finish = Literal["stop", "length", "garbled", "refused"]
"""stop: the answer is whole. length: it was cut off. garbled: what came was no completion, several times. refused: the
model or its server does not take this request."""
UNREADABLE: frozenset[Finish] = frozenset({"garbled", "refused"})
"""Ends of answers that have no text."""


class Key(NamedTuple):
    """The identity of a request: no two of a run share it, and all that is drawn for a request follows from it."""

    seed: int
    """The recipe's."""
    step: int
    """The number of the step in the recipe, from 0."""
    row: str
    """The id of the row that is asked about."""
    sample: int
    """The number of the request among those of its row."""

    def __str__(self) -> str:
        return f"{self.seed}/{self.step}/{self.row}/{self.sample}"


class Draw:
    """Random numbers that follow from a key alone: neither from the order of requests, nor from the process."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self._count = 0

    def integer(self, below: int) -> int:
        """A number from 0 to below - 1, each equally likely."""
        assert 0 < below <= 1 << 32
        rest = (1 << 64) % below
        while True:
            number = self._next()
            if number < (1 << 64) - rest:
                return number % below

    def uniform(self) -> float:
        """A number of at least 0 and below 1."""
        return (self._next() >> 11) / (1 << 53)

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Different entries, at most `count`, in a drawn order."""
        remaining = list(items)
        return [remaining.pop(self.integer(len(remaining))) for _ in range(min(count, len(remaining)))]

    def weighted(self, items: Sequence[Item], weights: Sequence[float]) -> Item:
        """An entry, as likely as its weight among all."""
        point = self.uniform() * sum(weights)
        for item, weight in zip(items, weights, strict=True):
            point -= weight
            if point < 0:
                return item
        return items[-1]

    def mark(self) -> str:
        """Sixteen hexadecimal digits that no text can have known before."""
        return f"{self._next():016x}"

    def _next(self) -> int:
        """The next 64 bits."""
        self._count += 1
        return number_of(self.key, self._count)


def number_of(key: Key, count: int = 0) -> int:
    """64 bits that follow from a key and a count."""
    content = json.dumps([*key, count]).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


class Message(NamedTuple):
    """A message of a conversation, as chat templates have it."""

    role: str
    content: str


@dataclass(frozen=True)
class Request:
    """One answer that is asked for.

    Attributes:
        messages: the conversation to answer; empty where `prompt` is given.
        prompt: a text to continue as it stands, without a chat template; None for a conversation.
        top_logprobs: the number of likeliest tokens that come with each token of the answer.
        parents: ids of the rows that are shown in it.
        columns: what the rows that are made of the answer take with them. Neither is part of the question.
    """

    key: Key
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    parents: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """The seed of the draws of its tokens: 31 bits, which every server takes."""
        return number_of(self.key) >> 33

    def digest(self, model: str) -> str:
        """A hash of all that decides the answer of a model of this name: another question has another one."""
        question = (
            *(model, self.messages, self.prompt, self.temperature, self.top_p, self.max_new_tokens),
            *(self.stop, self.top_logprobs, self.seed),
        )
        return hashlib.blake2b(json.dumps(question).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: without the thought before it; empty of an answer that is garbled or refused.
        top: for each token of the answer its likeliest tokens, as (text, log-probability in nats); None where none were
            asked for.
        detail: why it was garbled or refused.
        cost: in the currency of the price; 0 without one.
    """

    text: str
    finish: Finish
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    top: tuple[tuple[tuple[str, float], ...], ...] | None = None
    detail: str = ""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_json(self) -> dict[str, Any]:
        """The completion as JSON has it, without what is empty."""
        return {name: value for name, value in asdict(self).items() if value or name in ("text", "finish")}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Completion:
        """The completion that `as_json` has written. Raises TypeError or ValueError for anything else."""
        fields = dict(value)
        if not isinstance(fields.get("text"), str) or not isinstance(fields.get("finish"), str):
            raise ValueError("no text, or no finish")
        if (top := fields.get("top")) is not None:
            fields["top"] = tuple(tuple((str(text), float(logprob)) for text, logprob in each) for each in top)
        return cls(**fields)


@dataclass(frozen=True)
class Answered:
    """A request with its completion."""

    request: Request
    completion: Completion
