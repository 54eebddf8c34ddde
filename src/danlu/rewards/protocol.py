"""What rewards are given, and what they give back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class JudgedAnswer:
    """One answer to a prompt, as rewards see it."""

    text: str
    row: Mapping[str, Any]
    """Every column of the row that the prompt came from."""
    prompt: str | Sequence[Mapping[str, str]] = ""
    """A text, or the messages of a conversation."""
    tokens: int = 0
    """Of the answer, its end token among them."""
    finish: str = "stop"
    """Why it ended: "stop", "length", ..."""
    number: int = 0
    """Of the request that it answers, among those of a run."""
    sample: int = 0
    """Of the answer, among those to its request."""
    turns: Sequence[Mapping[str, Any]] = ()
    """With an environment: the messages behind the prompt; `text` is the last one's. Else none."""
    environment_reward: float | None = None
    """With an environment: what it gave."""


class Reward(Protocol):
    """Judges answers, those of a prompt or of many at once. None where it cannot say: counted, and never a 0."""

    def __call__(self, answers: Sequence[JudgedAnswer]) -> Sequence[float | None]: ...


def column_of(answer: JudgedAnswer, name: str) -> Any:
    """The value of a column. Raises KeyError, which names the columns that there are."""
    try:
        return answer.row[name]
    except KeyError:
        raise KeyError(f"no column {name!r} in this row; it has {', '.join(map(repr, answer.row))}") from None
