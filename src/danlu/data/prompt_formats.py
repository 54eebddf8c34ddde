"""Rows as prompts: by a template over their columns, or by the columns that known formats ask in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from danlu.core.errors import DataError
from danlu.core.prompt_template import PromptTemplate, PromptTemplateError
from danlu.core.spelling import did_you_mean
from danlu.data.column_values import decode_messages, require_string, type_name
from danlu.data.messages import Conversation, parse_tools, parse_turns
from danlu.data.preference_rows import Pair, parse_answers
from danlu.data.rows import QUESTIONS, Format, question_turns

PromptColumns = str | Conversation
"""A text to continue or to answer, or a conversation that the assistant is to answer."""

_COLUMNS: dict[Format | Literal["auto"], tuple[str, ...]] = {
    "auto": ("prompt", "messages", "conversations", *QUESTIONS),
    "alpaca": ("instruction",),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "prompt-completion": ("prompt", *QUESTIONS),
    "preference": ("prompt", "messages", "conversations", *QUESTIONS),
    "stepwise": ("prompt",),
}
"""The columns that may hold a prompt, by format; the first that a row has is taken."""


def parse_prompt(
    row: Mapping[str, Any], template: PromptTemplate | None, format: Format | Literal["auto"], where: str
) -> PromptColumns:
    """Returns the prompt of a row. `template`: that of `data.prompt`, in the place of the prompts of known formats.

    Raises:
        DataError: the row has no prompt, or one that makes no sense; the message names the place, the fault and a
            remedy.
    """
    if template is None:
        prompt = _of_columns(row, format, where)
    else:
        try:
            prompt = template.fill(row)
        except PromptTemplateError as error:
            missing = next((name for name in template.columns if name not in row), None)
            hint = "" if missing is None else did_you_mean(missing, list(row))
            raise DataError(f"{where}: data.prompt: {error}.{hint}") from None
    if isinstance(prompt, str) and not prompt.strip():
        raise _empty(where)
    return prompt


def _of_columns(row: Mapping[str, Any], format: Format | Literal["auto"], where: str) -> PromptColumns:
    name = next((name for name in _COLUMNS.get(format, ()) if row.get(name) is not None), None)
    if name == "prompt":
        prompt = decode_messages(row["prompt"])
        return prompt if isinstance(prompt, str) else _conversation(prompt, row, where, answered=False)
    if name in ("messages", "conversations"):
        # With answers in columns of their own the messages are the prompt.
        answered = not {"chosen", "rejected"} <= row.keys()
        return _conversation(row[name], row, where, answered=answered)
    if name is not None:
        return _question(row, require_string(row[name], name, where), where)
    if format in ("auto", "preference") and {"chosen", "rejected"} <= row.keys():
        pair = parse_answers(row, "preference", "preference", where)
        assert isinstance(pair, Pair), "the row is a pair"
        if not isinstance(pair.chosen, Conversation):
            return pair.chosen.prompt
        # The messages that both conversations begin with.
        return replace(pair.chosen, messages=tuple(message for message in pair.chosen.messages if message.is_context))
    raise DataError(_without_prompt(row, format, where))


def _conversation(turns: Any, row: Mapping[str, Any], where: str, *, answered: bool) -> Conversation:
    """The messages of a prompt, which may end in a turn of the assistant that the answer goes on with.

    answered: they are a whole conversation, and lose the answer that ends it.
    """
    if not isinstance(turns, str | list):
        raise DataError(f"{where}: a prompt is a text or a list of messages, not {type_name(turns)}")
    conversation = parse_turns(turns, row, where)
    messages = conversation.messages
    if messages and messages[-1].tool_calls and not answered:
        raise DataError(f"{where}: the prompt ends with a call, which no answer can go on with; add the tool's result")
    while answered and messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if not any(message.content.strip() for message in messages if message.role in ("user", "tool")):
        raise _empty(where)
    return replace(conversation, messages=tuple(replace(message, weight=None) for message in messages))


def _question(row: Mapping[str, Any], question: str, where: str) -> PromptColumns:
    """A question in a column of its own: a text where nothing comes before it."""
    messages = question_turns(row, question, where)
    tools = parse_tools(row.get("tools"), where)
    if not messages[-1].content.strip():
        raise _empty(where)
    return messages[0].content if len(messages) == 1 and not tools else Conversation(tuple(messages), tools)


def _empty(where: str) -> DataError:
    return DataError(f"{where}: the prompt is empty, so there is nothing to answer; fill it in, or remove the row")


def _without_prompt(row: Mapping[str, Any], format: Format | Literal["auto"], where: str) -> str:
    looked_for = _COLUMNS.get(format, ())
    text = next((name for name, value in row.items() if isinstance(value, str)), "question")
    advice = f"Say what the prompt is made of, as in data.prompt: '{{{text}}}'"
    if not looked_for:
        return f"{where}: rows of format {format} have no prompt. {advice}"
    there = ", ".join(row) or "(none)"
    return f"{where}: no prompt ({' or '.join(looked_for)}) in the columns {there}. {advice}"
