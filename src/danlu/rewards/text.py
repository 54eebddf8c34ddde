"""Rewards that are read off the text: equal to a column, the same number or mathematics, a pattern, a length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from danlu.rewards.math_answer import final_answer, final_number, same_answer, to_number
from danlu.rewards.protocol import JudgedAnswer, column_of


@dataclass(frozen=True)
class Exact:
    """1 where the answer is the text of a column, up to spaces at its ends; else 0."""

    column: str
    ignore_case: bool = False

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float]:
        return [
            float(self._plain(answer.text) == self._plain(str(column_of(answer, self.column)))) for answer in answers
        ]

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True)
class Numeric:
    """1 where the last number of the answer is that of the column; else 0. None where the column has no number."""

    column: str
    tolerance: float = 1e-6
    """Relative, and absolute for numbers below 1."""

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        return [self._judge(answer) for answer in answers]

    def _judge(self, answer: JudgedAnswer) -> float | None:
        wanted = _number(str(column_of(answer, self.column)))
        if wanted is None:
            return None
        number = _number(answer.text)
        return float(number is not None and abs(number - wanted) <= self.tolerance * max(1.0, abs(wanted)))


@dataclass(frozen=True)
class Mathematical:
    """1 where what the answer ends with is the same mathematics as the column's; else 0 (see `math_answer`)."""

    column: str

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        return [self._judge(answer) for answer in answers]

    def _judge(self, answer: JudgedAnswer) -> float | None:
        reference = str(column_of(answer, self.column))
        wanted = final_answer(reference) if _is_marked(reference) else reference.strip()
        if not wanted:
            return None
        given = final_answer(answer.text)
        return float(given is not None and same_answer(given, wanted))


@dataclass(frozen=True)
class Pattern:
    """1 where a regular expression is found in the answer, or has to match all of it; else 0."""

    pattern: str
    whole: bool = False

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float]:
        matches = self._compiled.fullmatch if self.whole else self._compiled.search
        return [float(matches(answer.text) is not None) for answer in answers]


@dataclass(frozen=True)
class Length:
    """0 within bounds of an answer's tokens, and -1 at `slack` tokens outside of them, linearly between; never less."""

    fewest: int = 0
    most: int | None = None
    slack: int = 1

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float]:
        return [-min(1.0, self._outside(answer.tokens) / self.slack) for answer in answers]

    def _outside(self, tokens: int) -> int:
        over = 0 if self.most is None else max(0, tokens - self.most)
        return max(over, self.fewest - tokens, 0)


def _number(text: str) -> float | None:
    number = final_number(text)
    return None if number is None else to_number(number)


def _is_marked(text: str) -> bool:
    """Whether a reference is a worked solution with its answer marked, and not the answer alone."""
    return "####" in text or "\\boxed" in text or "\\fbox" in text
