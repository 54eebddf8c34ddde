"""Raw rows as conversations, texts, completions or tokens: which format a row is in, and whether it makes sense."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from danlu.core.errors import DataError
from danlu.data.column_values import (
    abbreviate,
    decode_list,
    decode_messages,
    require_integers,
    require_string,
    type_name,
)
from danlu.data.messages import WEIGHT_KEYS, Conversation, Message, check_turn_order, parse_conversation, parse_tools

Format = Literal["text", "alpaca", "sharegpt", "messages", "prompt-completion", "tokenized", "preference", "stepwise"]
QUESTIONS = {"query": "response", "question": "answer", "instruction": "response"}
"""Column pairs that are one question and its answer, rendered as a conversation."""
CONTEXT_COLUMNS = ("input", "context")
"""Columns with what a question is about."""
# Columns of a row that seem to weight it, and are not read.
_WEIGHT_COLUMNS = frozenset({*WEIGHT_KEYS, "weights", "loss_weights", "sample_weight"})
JUDGEMENT_COLUMNS = ("label", "kto_tag", "is_desirable")
"""Columns that say whether an answer is a good one."""
_VERDICTS = {"true": True, "1": True, "false": False, "0": False, "-1": False}
_ASKING = re.compile(r"^q$|ques|prompt|query|instruction|problem|request|^user|^human|^input|source", re.IGNORECASE)
_ANSWERING = re.compile(
    r"^a$|^ans|answer|resp|reply|repl|complet|output|solution|target|^assistant|^gpt|result|summary", re.IGNORECASE
)
_OTHER_STAGES = {
    "preference": "these are preference pairs (chosen, rejected), rows for a stage dpo; stages pretrain and sft do not "
    "train on them; keep one answer for each prompt, in any format for sft",
    "stepwise": "these are answers judged step by step (completions, labels), rows for a stage reward with objective "
    "stepwise; stages pretrain and sft do not train on them; join the steps of right answers into one completion",
}


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or a part of one: `begins` and `ends` say whether its neighbours are documents of their own."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt (context) and the text to train on, rendered as they stand, without a chat template.

    `step_stops`, of a completion that is judged step by step: where each step ends in it, in characters.
    """

    prompt: str
    completion: str
    step_stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens [S] int32 and their loss weights [S] float32, as the row gives them."""

    tokens: np.ndarray
    weights: np.ndarray


Row = Conversation | Text | Completion | Tokenized


def detect_format(columns: Collection[str], where: str = "row") -> Format:
    """The format of a row with these columns: their names, or the row itself.

    Raises:
        DataError: none fits; the message lists the columns of each format.
    """
    names = set(columns)
    if "input_ids" in names:
        return "tokenized"
    if {"chosen", "rejected"} <= names or names & {"rejected_response", "rejected_messages"}:
        return "preference"
    if {"completions", "labels"} <= names:
        return "stepwise"
    if "messages" in names:
        return "messages"
    if "conversations" in names:
        return "sharegpt"
    if {"prompt", "completion"} <= names or any({ask, answer} <= names for ask, answer in QUESTIONS.items()):
        return "prompt-completion"
    if {"instruction", "output"} <= names:
        return "alpaca"
    if "text" in names:
        return "text"
    raise DataError(
        f"{where}: no known row format has the columns {', '.join(sorted(names)) or '(none)'}. "
        "Known: text · instruction, output (input, system, history) · conversations · messages · "
        "prompt, completion · query, response · question, answer · instruction, response (context) · input_ids "
        "(labels) · chosen, rejected (prompt) · prompt, completions, labels"
        f"{_suggested_columns(columns)}"
    )


def _suggested_columns(columns: Collection[str]) -> str:
    """The line of a recipe that would give columns a known format, by their names and the kinds of their values.

    columns: their names, or a row.
    """
    row = columns if isinstance(columns, Mapping) else dict.fromkeys(columns, "")
    if turns := [name for name, value in row.items() if _is_messages(decode_messages(value))]:
        return f". Or name them in the recipe: data.columns: {{messages: {_quoted(turns[0])}}}"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if not texts:
        return ""
    if len(texts) == 1:
        return f". Or name it in the recipe: data.columns: {{text: {_quoted(texts[0])}}}"
    asking = next((name for name in texts if _ASKING.search(name)), texts[0])
    rest = [name for name in texts if name != asking]
    answering = next((name for name in rest if _ANSWERING.search(name)), rest[0])
    ask, answer = _quoted(asking), _quoted(answering)
    template = json.dumps(f"{{{asking}}}\n{{{answering}}}", ensure_ascii=False)
    return (
        f". Or name them in the recipe: data.columns: {{question: {ask}, answer: {answer}}} for a conversation, "
        f"{{prompt: {ask}, completion: {answer}}} for texts as they stand, {{text: {template}}} for a document"
    )


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def _quoted(name: str) -> str:
    """A column as YAML has it: in quotes where it is not a plain word."""
    return name if re.fullmatch(r"[A-Za-z_][\w-]*", name) else json.dumps(name, ensure_ascii=False)


def parse_row(value: Mapping[str, Any], format: Format | Literal["auto"], where: str) -> Row:
    """Parses a raw row.

    With a fixed format a row of another one is an error, so pass the first row's format for the rest of its file.

    Raises:
        DataError: the row does not fit its format or makes no sense; the message names the place, the fault and a
            remedy.
    """
    known: Format = detect_format(value, where) if format == "auto" else format
    refuse_judged_answers(value, known, where)
    return parse_as(value, known, where)


def parse_as(value: Mapping[str, Any], format: Format, where: str) -> Row:
    """A raw row of a format that stage sft takes, whether or not a column judges its answer.

    Raises:
        DataError: the row does not fit its format or makes no sense.
    """
    try:
        return _PARSERS[format](value, where)
    except KeyError as error:
        raise DataError(format_mismatch(value, format, str(error.args[0]), where)) from None


def refuse_judged_answers(value: Mapping[str, Any], format: Format, where: str) -> None:
    """Refuse rows that compare or judge answers: to train on all of them would train the bad ones like the good ones.

    Raises:
        DataError: the message names the stage such rows are for.
    """
    if format in _OTHER_STAGES:
        raise DataError(f"{where}: {_OTHER_STAGES[format]}")
    if format not in ("text", "tokenized") and (verdict := judgement(value)) is not None:
        name, _ = verdict
        raise DataError(
            f"{where}: '{name}' ({abbreviate(value[name])}) judges the answer: unpaired preferences are rows for a "
            "stage kto; stages pretrain and sft would train the bad answers like the good ones. Keep the rows with "
            f"good answers and remove the column; if it means something else, data.columns: {{{name}: null}} hides it"
        )


def judgement(value: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The column of a row that judges its answer (TRL's KTO rows), and whether it is a good one; None without any.

    A column of other values is a label of something else.
    """
    for name in JUDGEMENT_COLUMNS:
        verdict = value.get(name)
        if isinstance(verdict, bool | int | float) and verdict in (-1, 0, 1):  # False and True are 0 and 1
            return name, verdict == 1
        if isinstance(verdict, str) and (known := _VERDICTS.get(verdict.strip().lower())) is not None:
            return name, known
    return None


def unread_keys(value: Mapping[str, Any], conversations: Iterable[Conversation]) -> list[str]:
    """Returns the keys of a row, next to its messages and in them, that seem to be meant for training and are
    not read.
    """
    columns = [f"{name} (a column)" for name in _WEIGHT_COLUMNS & value.keys() if value[name] is not None]
    return sorted(columns) + sorted({key for conversation in conversations for key in conversation.unread})


def format_mismatch(value: Mapping[str, Any], format: Format, missing: str, where: str) -> str:
    """Returns the error for a row that lacks a column of its format, with another format that it looks like, if any."""
    problem = f"{where}: no column '{missing}', which rows of format {format} have; the columns are {', '.join(value)}"
    try:
        likely = detect_format(value.keys(), where)
    except DataError:
        return problem
    if likely == format:
        return problem
    return f"{problem}. This row looks like {likely}: put rows of different formats in files of their own"


def _text(value: Mapping[str, Any], where: str) -> Text:
    text = value["text"]
    if not isinstance(text, str):
        raise DataError(f"{where}: 'text' must be a string, not {type_name(text)}")
    begins, ends = value.get("document_begins", True), value.get("document_ends", True)
    if not text.strip() and begins and ends:
        raise DataError(f"{where}: 'text' is empty; remove the row")
    return Text(text, bool(begins), bool(ends))


def _alpaca(value: Mapping[str, Any], where: str) -> Conversation:
    answer = require_string(value["output"], "output", where)
    return single_turn(value, require_string(value["instruction"], "instruction", where), answer, where)


def _prompt_completion(value: Mapping[str, Any], where: str) -> Conversation | Completion:
    for ask, reply in QUESTIONS.items():
        if ask in value and reply in value and "completion" not in value:
            question, answer = require_string(value[ask], ask, where), require_string(value[reply], reply, where)
            return single_turn(value, question, answer, where)
    prompt, completion = decode_messages(value["prompt"]), decode_messages(value["completion"])
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise DataError(f"{where}: 'completion' is empty, so there is nothing to train on; remove the row")
        return Completion(prompt, completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        kinds = f"{type_name(prompt)} and {type_name(completion)}"
        raise DataError(
            f"{where}: 'prompt' and 'completion' must both be strings or both be lists of messages, not {kinds}"
        )
    return parse_conversation([*prompt, *completion], value, where, context=len(prompt))


def single_turn(value: Mapping[str, Any], question: str, answer: str, where: str) -> Conversation:
    """A question and its answer after the earlier turns in `history`, a list of [question, answer]."""
    messages = [*question_turns(value, question, where), Message("assistant", answer)]
    return Conversation(check_turn_order(messages, where), parse_tools(value.get("tools"), where))


def question_turns(value: Mapping[str, Any], question: str, where: str) -> list[Message]:
    """Returns a question with its context from the row, after the earlier turns of the row and its system message."""
    for name in CONTEXT_COLUMNS:
        if addition := require_string(value.get(name) or "", name, where):
            question = f"{question}\n{addition}" if question else addition
    messages = []
    if system := require_string(value.get("system") or "", "system", where):
        messages.append(Message("system", system))
    for pair in decode_list(value.get("history")) or ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{where}: 'history' must be a list of [question, answer], but has {abbreviate(pair)}")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    return [*messages, Message("user", question)]


def _tokenized(value: Mapping[str, Any], where: str) -> Tokenized:
    tokens = require_integers(value["input_ids"], "input_ids", where)
    weights = np.ones(len(tokens), np.float32)
    for name in ("labels", "completion_mask", "assistant_masks", "loss_mask", "attention_mask"):
        if value.get(name) is None:
            continue
        column = require_integers(value[name], name, where)
        if len(column) != len(tokens):
            raise DataError(
                f"{where}: '{name}' has {len(column)} values, 'input_ids' has {len(tokens)}; they must be as long"
            )
        if name == "labels":
            wrong = np.flatnonzero((column != -100) & (column != tokens))
            if wrong.size:
                at = int(wrong[0])
                problem = f"'labels' differs from 'input_ids' at {at} ({column[at]}, not {tokens[at]} or -100)"
                raise DataError(f"{where}: {problem}. Labels must not be shifted: the model shifts them")
        weights *= column != -100 if name == "labels" else column != 0
        if name == "attention_mask":  # the last of them: padding is no part of the sample
            tokens, weights = tokens[column != 0], weights[column != 0]
    if not len(tokens):
        raise DataError(f"{where}: 'input_ids' is empty; remove the row")
    return Tokenized(tokens, weights)


_PARSERS: dict[Format, Callable[[Mapping[str, Any], str], Row]] = {
    "text": _text,
    "alpaca": _alpaca,
    "sharegpt": lambda value, where: parse_conversation(value["conversations"], value, where),
    "messages": lambda value, where: parse_conversation(value["messages"], value, where),
    "prompt-completion": _prompt_completion,
    "tokenized": _tokenized,
}
