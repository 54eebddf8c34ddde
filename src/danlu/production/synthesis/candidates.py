"""Rows in the making: what a step takes, what a generator makes of an answer, and the seam that generators follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from danlu.curation.rows import Part, Row
from danlu.curation.steps import KEEP, Verdict
from danlu.production.synthesis.requests import UNREADABLE, Answered, Draw, Message, Request


@dataclass(frozen=True)
class Candidate:
    """A row that a step takes and that its successors may drop.

    Attributes:
        row: its texts, its place, and what it was made of.
        group: the id of the row with the prompt that this one answers; its own where it is no answer.
        columns: what is written with it: its type, its score.
        rejected: of a pair of answers the worse one; `row` ends with the better one.
        given: the columns of the seed that it comes from, for rewards.
        where: its place as messages name it, or who wrote it.
    """

    row: Row
    group: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    rejected: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def prompt(self) -> tuple[Part, ...]:
        """The messages before the answer; all of them where there is none."""
        parts = self.row.parts
        return parts[:-1] if parts and parts[-1].role == "assistant" else parts

    @property
    def answer(self) -> str | None:
        """The text of the last message, if it is the assistant's."""
        last = self.row.parts[-1:]
        return last[0].text if last and last[0].role == "assistant" else None

    @property
    def instruction(self) -> str:
        """The text of the user's last turn."""
        return next((part.text for part in reversed(self.prompt) if part.role == "user"), "")

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a request has it."""
        return tuple(Message(part.role, part.text) for part in self.prompt)


@dataclass(frozen=True)
class Taken:
    """A row that a generator has made of an answer: its texts, and whether it is one.

    Attributes:
        parents: ids of the rows that it was made of.
        group: as a candidate has it; None for the row's own id.
    """

    parts: tuple[Part, ...]
    verdict: Verdict = KEEP
    parents: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    rejected: str | None = None


class Generator(Protocol):
    """Asks a model about a row, and makes rows of what it says. Both are pure: equal arguments give equal rows."""

    def requests(self, row: Candidate, draw: Draw) -> list[Request]: ...  # draw: of the row; a request has its own key

    def take(self, row: Candidate, answered: Sequence[Answered]) -> list[Taken]: ...  # in the order of the requests


def drop(reason: str, value: float, threshold: float) -> Verdict:
    """A verdict that drops a row. value: what was measured; threshold: the bound that it is on the wrong side of."""
    return Verdict("drop", reason, value, threshold)


def unusable(answered: Answered, kind: str) -> Verdict | None:
    """The verdict on an answer that is no row: cut off, without text, garbled or refused; None for a whole one."""
    completion, bound = answered.completion, answered.request.max_new_tokens
    if completion.finish in UNREADABLE:
        return drop(f"{kind}.{completion.finish}", 0, 1)
    if completion.finish == "length":
        return drop(f"{kind}.truncated", completion.completion_tokens, bound)
    if not completion.text.strip():
        return drop(f"{kind}.empty", 0, 1)
    return None


def quoted(text: str, mark: str) -> str:
    """A text between marks that it cannot know, so that nothing in it reads as a part of the question around it."""
    return f"<<<{mark}\n{text}\n{mark}>>>"
