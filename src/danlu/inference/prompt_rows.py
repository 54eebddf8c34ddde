"""Files of prompts: rows with `prompt` or `messages`, as tokens that a model can continue. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from danlu.core.errors import DataError
from danlu.core.spelling import did_you_mean
from danlu.data.column_values import type_name
from danlu.data.messages import MESSAGE_KEYS, parse_turns, turn_of
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.sources import read_file_rows
from danlu.inference.prompts import prompt_problem
from danlu.models.config import ModelConfig

if TYPE_CHECKING:  # a tenth of a second, before which rows can be read
    from danlu.inference.chat_tokenizer import ChatTokenizer

Row = TypeVar("Row")
Value = TypeVar("Value")

MAX_SHOWN_PROBLEMS = 20
_KEYS = ("prompt", "messages", "system", "tools")


@dataclass(frozen=True)
class PromptRow:
    """A row's prompt for a model: a text to continue, or a conversation to answer."""

    index: int
    """Its number in the file, from 0."""
    where: str
    """The place for messages: "questions.jsonl:3"."""
    given: Mapping[str, Any]
    """`prompt` or `messages`, as the row has it."""
    text: str | None = None
    """A prompt to take as it stands; None where there are turns."""
    turns: Sequence[Mapping[str, Any]] = ()
    """The conversation, as chat templates see it."""
    tools: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def of_text(cls, text: str, where: str) -> PromptRow:
        """A prompt that is no row of a file."""
        return cls(0, where, {"prompt": text}, text)

    def encode(self, chat_tokenizer: ChatTokenizer, *, as_turn: bool = False) -> list[int]:
        """The prompt's tokens. as_turn: a text is a user's turn, rendered by the chat template. Raises DataError."""
        if self.text is None:
            return chat_tokenizer.encode_chat(self.turns, self.tools)
        return chat_tokenizer.encode_chat_prompt(self.text) if as_turn else chat_tokenizer.encode_prompt(self.text)


def read_prompt_rows(file: Path) -> list[PromptRow]:
    """The prompts of a file of rows. Raises DataError with all rows that are wrong, or for a file without rows."""
    rows = list(read_file_rows(file))
    if not rows:
        raise DataError(f"{file}: there are no rows in it")
    return collect(rows, prompt_row)


def encode_rows(
    rows: Sequence[PromptRow],
    chat_tokenizer: ChatTokenizer,
    config: ModelConfig,
    *,
    as_turn: bool = False,
    virtual_tokens: int = 0,
) -> list[tuple[int, ...]]:
    """The tokens of each row's prompt. Raises DataError with all rows that the model cannot continue.

    as_turn: see `PromptRow.encode`. virtual_tokens: how many tokens adapters put before each prompt.
    """

    def encode(row: PromptRow) -> tuple[int, ...]:
        try:
            tokens = tuple(row.encode(chat_tokenizer, as_turn=as_turn))
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        if problem := prompt_problem(config, tokens, virtual_tokens):
            raise DataError(f"{row.where}: the prompt {problem}")
        return tokens

    return collect(rows, encode)


def collect(rows: Iterable[Row], parse: Callable[[Row], Value]) -> list[Value]:
    """Parses each row. Raises DataError with the problems of all rows that `parse` refuses."""
    values, problems = list[Value](), list[str]()
    for row in rows:
        try:
            values.append(parse(row))
        except DataError as error:
            problems.append(str(error))
    if problems:
        more = len(problems) - MAX_SHOWN_PROBLEMS
        rest = [f"and {more:,} rows more"] if more > 0 else []
        raise DataError("\n  ".join([*problems[:MAX_SHOWN_PROBLEMS], *rest]))
    return values


def prompt_row(row: RawRow) -> PromptRow:
    """A raw row as a prompt. Raises DataError for one that is none."""
    value = row.value
    if isinstance(value, BadRow):
        raise DataError(value.message)
    given = {key: value[key] for key in ("prompt", "messages") if value.get(key) is not None}
    if not given:
        raise DataError(_without_prompt(row, value))
    if len(given) == 2:
        raise DataError(f"{row.where}: both 'prompt' and 'messages'; keep the one to continue")
    if isinstance(given.get("prompt"), str):
        return PromptRow(row.index, row.where, given, text=given["prompt"])
    (key,) = given
    if not isinstance(given[key], list):
        kinds = "a text or a list of messages" if key == "prompt" else "a list of messages"
        raise DataError(f"{_place(row, key)}: '{key}' must be {kinds}, not {type_name(given[key])}")
    conversation = parse_turns(given[key], value, row.where)
    for unread in conversation.unread:
        if hint := did_you_mean(unread, list(MESSAGE_KEYS)):
            raise DataError(f"{_place(row, unread)}: unknown key '{unread}' of a message.{hint}")
    if not conversation.messages:
        raise DataError(f"{_place(row, key)}: '{key}' is an empty list; there is nothing to answer")
    if conversation.messages[-1].role == "assistant":
        raise DataError(
            f"{row.where}: the conversation ends with the assistant's turn, so there is nothing to answer; remove it"
        )
    return PromptRow(
        row.index, row.where, given, turns=[turn_of(each) for each in conversation.messages], tools=conversation.tools
    )


def _without_prompt(row: RawRow, value: Mapping[str, Any]) -> str:
    hints = {key: hint for key in value if key not in _KEYS and (hint := did_you_mean(key, list(_KEYS)))}
    misspelt = next(iter(hints), None)
    place = row.where if misspelt is None else _place(row, misspelt)
    hint = "" if misspelt is None else f" '{misspelt}':{hints[misspelt]}"
    return (
        f"{place}: no 'prompt' and no 'messages', one of which a row must have; the keys are "
        f"{', '.join(value) or '(none)'}.{hint}"
    )


def _place(row: RawRow, key: str) -> str:
    """Returns the place of a key: with the column, in characters from 1, where the row is a line of a file."""
    if not isinstance(row.content, bytes):
        return row.where
    line = row.content.decode("utf-8", "replace")
    column = max(line.find(json.dumps(key)), line.find(json.dumps(key, ensure_ascii=False)))
    return f"{row.where}:{column + 1}" if column >= 0 else row.where
