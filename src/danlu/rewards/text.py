"""Rewards that are read off the text: equal to a column, the same number or mathematics, a pattern, a length."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from danlu.rewards import math_answer
from danlu.rewards.final_answer import final_answer, final_number
from danlu.rewards.plain_numbers import Number, to_number
from danlu.rewards.protocol import Explains, JudgedAnswer, Verdict, column_of, is_null
from danlu.rewards.symbolic import TooLate

LONGEST_COMPARISON_S = 1.0
"""The seconds after which the process that compares two formulas is ended, where its own time limit does not hold."""


@dataclass(frozen=True)
class Exact:
    """1 where the answer is the text of a column, up to spaces at its ends, or the number that it holds; else 0.

    None where the column is null.
    """

    column: str
    ignore_case: bool = False

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        return [self._judge(answer) for answer in answers]

    def _judge(self, answer: JudgedAnswer) -> float | None:
        wanted = column_of(answer, self.column)
        if is_null(wanted):
            return None
        if isinstance(wanted, int | float) and not isinstance(wanted, bool):
            given = to_number(answer.text.strip())
            return float(given is not None and given.value == Fraction(repr(wanted)))
        return float(self._plain(answer.text) == self._plain(str(wanted)))

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True)
class Numeric(Explains):
    """1 where the last number of the answer is that of the column; else 0. None where the column has no number."""

    column: str
    tolerance: float = 1e-6
    """Relative, and absolute for numbers below 1."""

    def judge(self, answer: JudgedAnswer) -> Verdict:
        """1, 0 or None, with the number that was found."""
        column = column_of(answer, self.column)
        wanted = to_number(column) if isinstance(column, int | float) else _number(str(column or ""))
        if wanted is None:
            return Verdict.of(None, None, f"the column {self.column!r} has no number")
        last = final_number(answer.text)
        number = None if last is None else to_number(last)
        if number is None:
            return Verdict.of(0.0, last, "no number in the answer")
        right = self._near(number.value, wanted.value) or (
            number.is_percent != wanted.is_percent
            and self._near(*(each.value / 100 if each.is_percent else each.value for each in (number, wanted)))
        )
        return Verdict.of(float(right), last, f"{'the' if right else 'another'} number: {_shown(wanted)}")

    def _near(self, number: Fraction, wanted: Fraction) -> bool:
        return abs(number - wanted) <= Fraction(self.tolerance) * max(Fraction(1), abs(wanted))


@dataclass(frozen=True)
class Mathematical(Explains):
    """1 where the answer's end is the same mathematics as the column's; else 0 (see `final_answer`, `math_answer`).

    None where the column is null or empty. Formulas are compared in a reward process: `decide` judges all others.
    """

    column: str

    def judge(self, answer: JudgedAnswer) -> Verdict:
        """Returns 1, 0 or None, with the extracted text and the reading by which it was compared."""
        return self.decide(answer) or self._compare(answer)

    def decide(self, answer: JudgedAnswer) -> Verdict | None:
        """The verdict where no formula has to be compared, else None; linear in the length, and without math-verify."""
        given, wanted = self._extracted(answer)
        if not wanted:
            return Verdict.of(None, None, f"the column {self.column!r} has no reference")
        if given is None:
            return Verdict.of(0.0, None, "no answer was found")
        match = math_answer.decide(given, wanted)
        return None if match is None else Verdict.of(float(match.is_equal), given, match.why)

    def late(self, answer: JudgedAnswer) -> Verdict:
        """The verdict on an answer that takes too long to compare: it is wrong."""
        given, _ = self._extracted(answer)
        return Verdict.of(0.0, given, "late: comparing it takes too long", is_late=True)

    def _compare(self, answer: JudgedAnswer) -> Verdict:
        given, wanted = self._extracted(answer)
        assert given is not None and wanted, "what has no formula is decided at once"
        try:
            match = math_answer.match_answer(given, wanted)
        except TooLate:
            return self.late(answer)
        return Verdict.of(float(match.is_equal), given, match.why)

    def _extracted(self, answer: JudgedAnswer) -> tuple[str | None, str]:
        """Returns the answer's final text, and the reference."""
        column = column_of(answer, self.column)
        wanted = "" if is_null(column) else _reference(str(column))
        numeric, several = math_answer.is_number(wanted), math_answer.is_list(wanted)
        return final_answer(answer.text, numeric=numeric, several=several), wanted


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
        most = math.inf if self.most is None else self.most
        return [-min(1.0, max(answer.tokens - most, self.fewest - answer.tokens, 0) / self.slack) for answer in answers]


def _number(text: str) -> Number | None:
    number = final_number(text)
    return None if number is None else to_number(number)


def _shown(number: Number) -> str:
    return (
        f"{float(number.value):g}{'%' if number.is_percent else ''}" if abs(number.value) < 10**300 else "a large one"
    )


@lru_cache(maxsize=4096)
def _reference(column: str) -> str:
    """The answer of a worked solution, or the text itself; the same for all answers to a prompt."""
    is_marked = any(mark in column for mark in ("####", "\\boxed", "\\fbox"))
    return (final_answer(column) or "") if is_marked else column.strip()
