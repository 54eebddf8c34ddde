"""The arguments and results of rewards."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class TrainerState:
    """The state of a training run when an answer was drawn; the names are those of transformers."""

    global_step: int = 0
    """Updates before."""
    max_steps: int = 0
    """Updates of the whole run; 0 where it is no run."""
    epoch: float = 0.0
    """How often each prompt has been asked, on average."""


@dataclass(frozen=True)
class JudgedAnswer:
    """One answer to a prompt, as rewards see it."""

    text: str
    row: Mapping[str, Any]
    """Every column of the row that the prompt came from."""
    prompt: str | Sequence[Mapping[str, str]] = ""
    """A text, or the messages of a conversation."""
    tokens: int = 0
    """The number of tokens of the answer, its end token among them."""
    finish: str = "stop"
    """Why it ended: "stop", "length", ..."""
    number: int = 0
    """The number of the request that it answers, among those of a run."""
    sample: int = 0
    """The number of the answer, among those to its request."""
    turns: Sequence[Mapping[str, Any]] = ()
    """The messages behind the prompt, with an environment; `text` is that of the last one. Empty otherwise."""
    environment_reward: float | None = None
    """The environment's reward; None without an environment."""
    token_ids: Sequence[int] = ()
    """The tokens of the answer; empty where its text alone is known."""
    state: TrainerState = TrainerState()


@dataclass(frozen=True)
class StepRewards:
    """The rewards of an answer step by step (process rewards). As one number it is their sum."""

    ends: tuple[int, ...]
    """Characters of the answer up to the end of each step, not falling."""
    values: tuple[float, ...]
    """The reward of each step."""


LONGEST_SHOWN = 200
"""The most characters of an answer, or of a judge's reply, that a verdict repeats."""


@dataclass(frozen=True)
class Verdict:
    """A reward's number for an answer, and how it came about: rollouts.jsonl has both, so that a wrong one is seen."""

    value: float | None
    extracted: str | None = None
    """The part of the text that was judged; None where nothing in it looked like an answer."""
    why: str = ""
    is_late: bool = False
    """Whether the reward is 0 because comparing took too long."""

    @classmethod
    def of(cls, value: float | None, extracted: str | None, why: str, *, is_late: bool = False) -> Verdict:
        """Builds a verdict with its texts cut to a length for logs."""
        return cls(value, None if extracted is None else shortened(extracted), shortened(why), is_late)

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict as an object for a line of a log."""
        return {"extracted": self.extracted, "why": self.why, **({"late": True} if self.is_late else {})}


def shortened(text: str) -> str:
    """The text, or its first characters."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


class Reward(Protocol):
    """Judges answers, those of a prompt or of many at once. None where it cannot say: counted, and never a 0."""

    def __call__(self, answers: Sequence[JudgedAnswer]) -> Sequence[float | StepRewards | None]: ...


@dataclass(frozen=True)
class Logged:
    """Values that a reward adds to the logs of a run."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values for this answer, for rollouts.jsonl."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the call that this answer was the first of."""


class Logs(ABC):
    """A `Reward` that logs."""

    @abstractmethod
    def take_logged(self, count: int) -> list[Logged]:
        """Takes the values that the last call logged, for each of its answers; they are forgotten then."""


class Explains(ABC):
    """A `Reward` that also returns the text it judged, and the reason."""

    @abstractmethod
    def judge(self, answer: JudgedAnswer) -> Verdict:
        """The verdict on an answer."""

    def verdicts(self, answers: Sequence[JudgedAnswer]) -> list[Verdict]:
        """The verdict on each answer."""
        return [self.judge(answer) for answer in answers]

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        return [verdict.value for verdict in self.verdicts(answers)]


def lines_of(text: str) -> list[tuple[str, int]]:
    """(line, characters of the text up to its end) of each line that is not empty: the steps of an answer."""
    lines, start = [], 0
    for line in text.splitlines(keepends=True):
        (bare,) = line.splitlines()
        if bare.strip():
            lines.append((bare, start + len(bare)))
        start += len(line)
    return lines


def column_of(answer: JudgedAnswer, name: str) -> Any:
    """The value of a column. Raises KeyError, which names the columns that there are."""
    try:
        return answer.row[name]
    except KeyError:
        raise KeyError(f"no column {name!r} in this row; it has {', '.join(map(repr, answer.row))}") from None


def is_null(value: Any) -> bool:
    """Whether a column holds nothing: null, or the NaN that tables have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))
