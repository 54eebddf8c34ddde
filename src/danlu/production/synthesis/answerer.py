"""The interface of models that answer requests: a model of this machine, or a server with OpenAI's interface."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from danlu.production.synthesis.requests import Answered, Request


class Answerer(Protocol):
    """A model that answers requests."""

    @property
    def name(self) -> str: ...  # of the model, as provenance has it

    @property
    def user_header(self) -> str | None: ...  # the text before a user's first turn; None where it is not known

    @property
    def user_end(self) -> tuple[str, ...]: ...  # texts that end a user's turn, besides tokens that end any

    def check(self, top_logprobs: int) -> None: ...

    # Raises DanluError where it is not there, or has no log-probabilities of as many tokens, before anything is asked.

    def generate(self, requests: Iterable[Request]) -> Iterator[Answered]: ...

    # Every answer as soon as it is there, in any order; takes from `requests` only what it can begin with. Raises
    # ResourceError where the model is gone, after all answers that have arrived.

    def drain(self) -> Iterator[Answered]: ...  # after an interruption of `generate` what arrives of the requests begun

    def close(self) -> None: ...
