"""Rows that hold an answer, as prompts with a reference; and whether another answer says the same. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from danlu.core.errors import DataError
from danlu.data.messages import Conversation, turn_of
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.rows import Completion, Format, detect_format, parse_row
from danlu.inference.prompt_rows import PromptRow, collect


@dataclass(frozen=True)
class AnsweredRow:
    """A prompt, and the answer that its row gives."""

    prompt: PromptRow
    reference: str


def answered_rows(rows: Iterable[RawRow]) -> list[AnsweredRow]:
    """The rows of a file, all of one format. Raises DataError with all those that hold no answer.

    Of a conversation the last answer is the reference, and all before it the prompt.
    """
    row_format: Format | None = None

    def parse(row: RawRow) -> AnsweredRow:
        nonlocal row_format
        if isinstance(row.value, BadRow):
            raise DataError(row.value.message)
        row_format = row_format or detect_format(row.value, row.where)
        return _answered(row, row_format)

    return collect(rows, parse)


def _answered(row: RawRow, row_format: Format) -> AnsweredRow:
    assert not isinstance(row.value, BadRow), "the caller has looked"
    match parse_row(row.value, row_format, row.where):
        case Completion(prompt, completion):
            given = {"prompt": prompt}
            return AnsweredRow(PromptRow(row.index, row.where, given, text=prompt), completion)
        case Conversation(messages, tools) if messages[-1].role == "assistant":
            turns = [turn_of(message) for message in messages[:-1]]
            prompt_row = PromptRow(row.index, row.where, {"messages": turns}, turns=turns, tools=tools)
            return AnsweredRow(prompt_row, messages[-1].content)
        case Conversation():
            raise DataError(f"{row.where}: the conversation does not end with an answer to compare with; remove it")
    raise DataError(
        f"{row.where}: rows of format {row_format} have no answers to compare with: conversations and prompts with "
        "completions have"
    )


@dataclass(frozen=True)
class AnswerMatch:
    """Compares two answers: their whole text, or the last match of a pattern; white space does not count."""

    pattern: re.Pattern[str] | None = None
    """The pattern's group is compared, or its whole match where it has no group."""

    def extract(self, answer: str) -> str | None:
        """Returns the text to compare, with single spaces; None where the pattern does not match."""
        if self.pattern is None:
            return _single_spaced(answer)
        matches = list(self.pattern.finditer(answer))
        if not matches:
            return None
        return _single_spaced(matches[-1].group(1 if self.pattern.groups else 0) or "")

    def references(self, rows: Iterable[AnsweredRow]) -> list[str]:
        """Returns the text to compare of each reference. Raises DataError with the rows in which the pattern does not
        match."""

        def extract(row: AnsweredRow) -> str:
            reference = self.extract(row.reference)
            if reference is None:
                assert self.pattern is not None, "without a pattern all is compared"
                raise DataError(f"{row.prompt.where}: the answer has nothing like --pattern {self.pattern.pattern!r}")
            return reference

        return collect(rows, extract)


def _single_spaced(text: str) -> str:
    return " ".join(text.split())
