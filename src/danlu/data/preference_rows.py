"""Rows of judged answers: pairs of a preferred and a rejected answer, answers judged alone, and single steps.

Each answer is kept as a whole conversation (or a prompt and its completion) with the prompt marked as context, so that
chat templates see the same as in a chat.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, Literal

from danlu.core.errors import DataError
from danlu.data.column_values import abbreviate, decode_list, decode_messages, require_string, type_name
from danlu.data.messages import Conversation, parse_conversation
from danlu.data.raw_rows import BadRow
from danlu.data.rows import (
    JUDGEMENT_COLUMNS,
    QUESTIONS,
    Completion,
    Format,
    Row,
    Text,
    Tokenized,
    detect_format,
    format_mismatch,
    judgement,
    parse_as,
    single_turn,
)
from danlu.data.sources import read_rows
from danlu.recipe.sections import Source
from danlu.recipe.sections.base import RowType
from danlu.recipe.sections.data import Columns

Answer = Conversation | Completion
"""A prompt with one answer to it; the messages of the prompt are marked as context."""

STAGES: dict[RowType, str] = {
    "preference": "stage dpo, or stage reward with objective bradley-terry",
    "unpaired": "stage kto",
    "stepwise": "stage reward with objective stepwise",
}
"""The stages and objectives for each type of row, for messages."""
_NEEDED: dict[RowType, str] = {
    "preference": "pairs of answers (chosen, rejected)",
    "unpaired": f"answers with a column that judges each of them ({', '.join(JUDGEMENT_COLUMNS)})",
    "stepwise": "answers in steps (prompt, completions, labels)",
}
_TURNS_COLUMNS = ("messages", "conversations")  # with the prompt's messages
_TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_STEP_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, and by how much the chosen one is better where the row says so."""

    chosen: Answer
    rejected: Answer
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer that is desirable, or is not."""

    answer: Answer
    is_desirable: bool


@dataclass(frozen=True, slots=True)
class StepwiseAnswer:
    """An answer of several steps, which are joined in it (`step_stops`).

    labels: [steps] 1 for a right step, 0 for a wrong one, NaN for one that nobody judged.
    """

    answer: Answer
    labels: tuple[float, ...]


AnswerRow = Pair | JudgedAnswer | StepwiseAnswer


def answers_of(row: Row | AnswerRow) -> tuple[Row, ...]:
    """The answers of a row, of a pair the chosen one first; of a row for other stages, the row itself."""
    if isinstance(row, Pair):
        return row.chosen, row.rejected
    return (row.answer,) if isinstance(row, JudgedAnswer | StepwiseAnswer) else (row,)


def parse_answers(
    value: Mapping[str, Any], format: Format | Literal["auto"], row_type: RowType, where: str
) -> AnswerRow:
    """Parses a raw row into its answers.

    Raises:
        DataError: the row does not fit its format, is for another stage or makes no sense; the message names the place,
            the fault and a remedy.
    """
    known = require_row_type(value, format, row_type, where)
    try:
        if known == "preference":
            return _pair(value, where)
        return _stepwise(value, where) if known == "stepwise" else _judged(value, known, where)
    except KeyError as error:
        raise DataError(format_mismatch(value, known, str(error.args[0]), where)) from None


def require_row_type(
    value: Mapping[str, Any], format: Format | Literal["auto"], row_type: RowType, where: str
) -> Format:
    """Returns the format of a row, if it has the type that a stage takes.

    Raises:
        DataError: it has another type; the message names the stage for such rows.
    """
    known: Format = detect_format(value, where) if format == "auto" else format
    actual_type = _row_type(value, known)
    if actual_type == row_type:
        return known
    stage = (
        STAGES[actual_type] if actual_type is not None else "stage pretrain or sft" if known == "text" else "stage sft"
    )
    shown = f"rows of format {known}" if actual_type in (None, known) else _NEEDED["unpaired"]
    raise DataError(f"{where}: this stage needs {_NEEDED[row_type]}, and these are {shown}, which are for {stage}")


def first_row_type(source: Source, columns: Columns | None = None) -> RowType | None:
    """Returns the type of a source's rows, by the first one that can be read; None for rows that judge no answer.

    columns: as `read_rows` has them.
    Raises:
        DataError: the source cannot be read, or no row of it.
    """
    for row in read_rows(source, columns):
        if not isinstance(row.value, BadRow):
            known = detect_format(row.value, row.where) if source.format == "auto" else source.format
            return _row_type(row.value, known)
    raise DataError(f"{source.path}: no row of it can be read")


def _row_type(value: Mapping[str, Any], known: Format) -> RowType | None:
    if known in ("preference", "stepwise"):
        return "preference" if known == "preference" else "stepwise"
    return "unpaired" if known not in ("text", "tokenized") and judgement(value) is not None else None


# -- pairs -------------------------------------------------------------------------------------------------------------


def _pair(value: Mapping[str, Any], where: str) -> Pair:
    chosen, rejected = _chosen_and_rejected(value, where)
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same answer, so nothing is preferred; remove the row")
    return Pair(chosen, rejected, _margin(value.get("margin"), where))


def _chosen_and_rejected(value: Mapping[str, Any], where: str) -> tuple[Answer, Answer]:
    """The answers of a pair, from the columns that the row has for prompt and answers."""
    if "chosen" not in value or "rejected" not in value:  # ms-swift's: a conversation, and what is worse than its end
        return _with_other_end(value, where)
    chosen, rejected = decode_messages(value["chosen"]), decode_messages(value["rejected"])
    for name in _TURNS_COLUMNS:
        if value.get(name) is not None:
            turns = _turns(value[name], name, where)
            return _answer(turns, chosen, "chosen", value, where), _answer(turns, rejected, "rejected", value, where)
    prompt: Any = decode_messages(value["prompt"]) if value.get("prompt") is not None else None
    if isinstance(prompt, list):
        return _answer(prompt, chosen, "chosen", value, where), _answer(prompt, rejected, "rejected", value, where)
    if prompt is None and (question := next((name for name in QUESTIONS if value.get(name) is not None), None)):
        return _reply(question, chosen, "chosen", value, where), _reply(question, rejected, "rejected", value, where)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            _require_prompt(require_string(prompt, "prompt", where), where)
            return _completion(prompt, chosen, "chosen", where), _completion(prompt, rejected, "rejected", where)
        both = _transcript(chosen, "chosen", where), _transcript(rejected, "rejected", where)
        return _without_prompt(*both, value, where)
    if _begins_with_answer(chosen) and _begins_with_answer(rejected) and prompt is not None:
        asked = [{"role": "user", "content": require_string(prompt, "prompt", where)}]
        return _answer(asked, chosen, "chosen", value, where), _answer(asked, rejected, "rejected", value, where)
    # Whole conversations; a prompt next to them (UltraFeedback) repeats their beginning.
    return _without_prompt(_turns(chosen, "chosen", where), _turns(rejected, "rejected", where), value, where)


def _with_other_end(value: Mapping[str, Any], where: str) -> tuple[Answer, Answer]:
    """`messages` end with the chosen answer; `rejected_response` takes its place, or `rejected_messages` of all."""
    turns = _turns(value["messages"], "messages", where)
    if value.get("rejected_messages") is not None:
        return _without_prompt(turns, _turns(value["rejected_messages"], "rejected_messages", where), value, where)
    rejected = decode_messages(value["rejected_response"])
    chosen = parse_conversation(turns, value, where)
    if chosen.messages[-1].role != "assistant":
        raise DataError(f"{where}: 'messages' must end with the chosen answer, which 'rejected_response' is worse than")
    kept = len(turns) - 1
    return (
        _answer(turns[:kept], turns[kept:], "messages", value, where),
        _answer(turns[:kept], rejected, "rejected_response", value, where),
    )


def _answer(prompt: Sequence[Any], answer: Any, name: str, value: Mapping[str, Any], where: str) -> Conversation:
    """The messages of a prompt with an answer: a text, a message, or a list of messages."""
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    answer = _turns([answer] if isinstance(answer, Mapping) else answer, name, where)
    if not prompt:
        raise DataError(f"{where}: the prompt is empty; add the user's turn, or remove the row")
    return _checked(parse_conversation([*prompt, *answer], value, where, context=len(prompt)), name, where)


def _reply(question: str, answer: Any, name: str, value: Mapping[str, Any], where: str) -> Conversation:
    """A question in a column of its own, with the turns before it, and an answer: a text, or a message."""
    if isinstance(answer, Mapping):
        answer = answer.get("value", answer.get("content"))
    text = require_string(answer, name, where)
    conversation = single_turn(value, require_string(value[question], question, where), text, where)
    return _checked(_as_context(conversation, len(conversation.messages) - 1), name, where)


def _completion(prompt: str, completion: str, name: str, where: str) -> Completion:
    if not completion.strip():
        raise DataError(f"{where}: '{name}' is empty, so there is no answer; remove the row or fill it in")
    return Completion(prompt, completion)


def _without_prompt(
    chosen: Sequence[Any], rejected: Sequence[Any], value: Mapping[str, Any], where: str
) -> tuple[Answer, Answer]:
    """Parses two whole conversations; their common messages are the prompt."""
    both = [
        parse_conversation(turns, value, f"{where} {name}")
        for turns, name in ((chosen, "chosen"), (rejected, "rejected"))
    ]
    first, second = (conversation.messages for conversation in both)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first[:-1], second[:-1], strict=False)))
    if not any(message.role != "system" for message in first[:common]):
        raise DataError(
            f"{where}: chosen and rejected have no message in common that could be their prompt; let both begin with "
            "the user's turn, or give the prompt in a column of its own"
        )
    answers = [
        _checked(_as_context(conversation, common), name, where)
        for conversation, name in zip(both, ("chosen", "rejected"), strict=True)
    ]
    return answers[0], answers[1]


def _transcript(text: str, name: str, where: str) -> list[dict[str, str]]:
    """The turns of a transcript with a "Human:" or "Assistant:" before each, as HH-RLHF has them."""
    before, *parts = _TRANSCRIPT_TURN.split(text)
    if before.strip() or not parts:
        raise DataError(
            f"{where}: '{name}' is a text without a column 'prompt', and no transcript of turns that begin with "
            "'\\n\\nHuman:' and '\\n\\nAssistant:' either; add the column, or write a list of messages"
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": said.strip()} for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _margin(margin: Any, where: str) -> float | None:
    if margin is None:
        return None
    try:
        number = math.nan if isinstance(margin, bool) else float(margin)  # a csv cell is a string
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: 'margin' must be a number, by how much the chosen answer is better, not {margin!r}")
    return number


# -- answers judged alone ----------------------------------------------------------------------------------------------


def _judged(value: Mapping[str, Any], format: Format, where: str) -> JudgedAnswer:
    verdict = judgement(value)
    assert verdict is not None, "the type of the row was checked"
    row = parse_as(value, format, where)
    assert not isinstance(row, Text | Tokenized), "such rows are no answers"
    if isinstance(row, Completion):
        _require_prompt(row.prompt, where)
    elif not any(message.is_context for message in row.messages):
        last_question = max(number for number, message in enumerate(row.messages) if message.role == "user")
        row = _as_context(row, last_question + 1)
    if isinstance(row, Conversation):
        row = _checked(row, "messages", where)
    return JudgedAnswer(row, verdict[1])


# -- steps -------------------------------------------------------------------------------------------------------------


def _stepwise(value: Mapping[str, Any], where: str) -> StepwiseAnswer:
    steps, labels = decode_list(value["completions"]), decode_list(value["labels"])
    for name, column in (("completions", steps), ("labels", labels)):
        if not isinstance(column, list):
            raise DataError(f"{where}: '{name}' must be a list with an entry for each step, not {type_name(column)}")
    if len(steps) != len(labels):
        raise DataError(f"{where}: 'completions' has {len(steps)} steps and 'labels' {len(labels)}; give one for each")
    if not steps:
        raise DataError(f"{where}: 'completions' is empty, so there is no answer; remove the row")
    for number, step in enumerate(steps, 1):
        if not require_string(step, f"completions[{number - 1}]", where).strip():
            raise DataError(f"{where}: step {number} of 'completions' is empty; remove it and its label")
    wrong = next((label for label in labels if label is not None and label not in (0, 1)), None)
    if wrong is not None:
        raise DataError(f"{where}: 'labels' must be true, false or null for each step, not {abbreviate(wrong)}")
    steps = [step.strip(_STEP_SEPARATOR) for step in steps]
    ended = [f"{step}{_STEP_SEPARATOR}" for step in steps[:-1]] + steps[-1:]
    text, stops = "".join(ended), tuple(accumulate(map(len, ended)))
    marks = tuple(math.nan if label is None else float(label) for label in labels)
    prompt = decode_messages(value["prompt"])
    if isinstance(prompt, str):
        _require_prompt(prompt, where)
        return StepwiseAnswer(Completion(prompt, text, stops), marks)
    answer = _answer(_turns(prompt, "prompt", where), text, "completions", value, where)
    begun = answer.messages[-1].begun
    return StepwiseAnswer(replace(answer, step_stops=tuple(begun + stop for stop in stops)), marks)


# -- prompts -----------------------------------------------------------------------------------------------------------


def _turns(turns: Any, name: str, where: str) -> list[Any]:
    turns = decode_list(turns)
    if not isinstance(turns, list):
        raise DataError(f"{where}: '{name}' must be a list of messages, not {type_name(turns)}")
    return turns


def _begins_with_answer(turns: Any) -> bool:
    first = turns[0] if isinstance(turns, list) and turns else turns
    return isinstance(first, Mapping) and first.get("role", first.get("from")) in ("assistant", "gpt")


def _as_context(conversation: Conversation, messages: int) -> Conversation:
    """The same with its first messages as the prompt."""
    marked = [replace(message, is_context=True) for message in conversation.messages[:messages]]
    return replace(conversation, messages=(*marked, *conversation.messages[messages:]))


def _checked(conversation: Conversation, name: str, where: str) -> Conversation:
    """The conversation, if an answer of the assistant ends it and there is a prompt before. Own weights are not read.

    Raises:
        DataError: the prompt or the answer is missing.
    """
    messages = conversation.messages
    prompt = [message for message in messages if message.is_context and message.role != "system"]
    said = [message.content or "call" for message in prompt if message.content.strip() or message.tool_calls]
    _require_prompt("".join(said), where)
    if messages[-1].role != "assistant" or messages[-1].is_context:
        raise DataError(f"{where}: '{name}' must end with the assistant's answer; add it, or remove the row")
    return replace(conversation, messages=tuple(replace(message, weight=None) for message in messages))


def _require_prompt(prompt: str, where: str) -> None:
    if not prompt.strip():
        raise DataError(f"{where}: the prompt is empty, so there is nothing to answer; fill it in, or remove the row")
