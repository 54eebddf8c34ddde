"""The texts in the columns of a raw row, each with its role and its place, and rows with other texts in these places.

What a place is follows from the row's format. Texts keep the order in which they are read: a prompt before its answers,
a thought before the text of its message. What is in the columns besides, such as labels, names and tools, is no text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from danlu.core.errors import DataError
from danlu.data.column_values import decode_list, decode_messages
from danlu.data.messages import REASONING_KEYS, ROLES, content_text_key
from danlu.data.preference_rows import parse_answers
from danlu.data.rows import CONTEXT_COLUMNS, QUESTIONS, Format, parse_as

TextRole = Literal["text", "system", "user", "assistant", "tool", "repeated"]
_ENCODED = None
"""A step of a path into JSON that stands as a text in its column, as in csv files."""
Path = tuple[str | int | None, ...]
_OF_PAIRS: frozenset[Format] = frozenset({"preference"})


@dataclass(frozen=True, slots=True)
class PlacedText:
    """A text of a row.

    Attributes:
        path: the column, then keys and numbers of entries below it; None for what is decoded from JSON.
        role: "text" of a document, that of a message, "tool" also for the arguments of a call; "repeated" of a pair's
            text that stands in the row before, as in two conversations that begin alike.
    """

    path: Path
    role: TextRole
    text: str


def placed_texts(value: Mapping[str, Any], format: Format) -> list[PlacedText]:
    """The texts of a row that `check_row` has let pass, but for empty ones."""
    texts = [text for text in _OF_FORMAT[format](value) if text.text]
    return _without_repeated(texts) if format in _OF_PAIRS else texts


def check_row(value: Mapping[str, Any], format: Format, where: str) -> None:
    """Raises DataError for a row that does not fit its format or makes no sense, for whatever stage it is meant."""
    if format == "tokenized":
        raise DataError(
            f"{where}: rows of tokens (input_ids) have no texts to look at. Name the rows they were made of"
        )
    if format == "preference" or format == "stepwise":
        parse_answers(value, format, format, where)
    else:
        parse_as(value, format, where)


def with_texts(value: Mapping[str, Any], places: Sequence[PlacedText], texts: Sequence[str]) -> dict[str, Any]:
    """A copy of a row with other texts in the places of `placed_texts`, in their order."""
    changed = copy.deepcopy(dict(value))
    for place, text in zip(places, texts, strict=True):
        if text != place.text:
            _put(changed, place.path, text)
    return changed


def _put(container: Any, path: Path, text: str) -> None:
    """Puts a text into lists and objects, in place."""
    step, *rest = path
    if not rest:
        container[step] = text
    elif rest[0] is _ENCODED:
        decoded = json.loads(container[step])
        if rest[1:]:
            _put(decoded, tuple(rest[1:]), text)
        else:
            decoded = text
        container[step] = json.dumps(decoded, ensure_ascii=False)
    else:
        _put(container[step], tuple(rest), text)


def _without_repeated(texts: Sequence[PlacedText]) -> list[PlacedText]:
    """Texts of which those that an earlier one has said, in the same role, are "repeated"."""
    said = set[tuple[str, str]]()
    result = []
    for text in texts:
        known = (text.role, text.text) in said
        said.add((text.role, text.text))
        result.append(replace(text, role="repeated") if known else text)
    return result


def _column(value: Mapping[str, Any], name: str, role: TextRole) -> Iterator[PlacedText]:
    """The text in a column; none where the column is absent, null, or no text."""
    if isinstance(text := value.get(name), str):
        yield PlacedText((name,), role, text)


def _document(value: Mapping[str, Any]) -> Iterator[PlacedText]:
    yield from _column(value, "text", "text")


def _single_turn(value: Mapping[str, Any], question: str, answer: str) -> Iterator[PlacedText]:
    """A question with its context and the answer to it, after earlier turns."""
    yield from _column(value, "system", "system")
    path, history = _decoded(("history",), value.get("history"), decode_list)
    for number, pair in enumerate(history or ()):
        yield PlacedText((*path, number, 0), "user", pair[0])
        yield PlacedText((*path, number, 1), "assistant", pair[1])
    yield from _column(value, question, "user")
    for name in CONTEXT_COLUMNS:
        yield from _column(value, name, "user")
    yield from _column(value, answer, "assistant")


def _prompt_completion(value: Mapping[str, Any]) -> Iterator[PlacedText]:
    for question, answer in QUESTIONS.items():
        if question in value and answer in value and "completion" not in value:
            yield from _single_turn(value, question, answer)
            return
    if not isinstance(decode_messages(value["prompt"]), str):
        yield from _column(value, "system", "system")
    yield from _either(value, "prompt", "user")
    yield from _either(value, "completion", "assistant")


def _turns(value: Mapping[str, Any], column: str) -> Iterator[PlacedText]:
    """The messages of a row with its system prompt."""
    yield from _column(value, "system", "system")
    yield from _either(value, column, "user")


def _preference(value: Mapping[str, Any]) -> Iterator[PlacedText]:
    yield from _column(value, "system", "system")
    for name in ("messages", "conversations"):
        if value.get(name) is not None:
            yield from _either(value, name, "user")
    for name in ("prompt", *QUESTIONS):
        yield from _either(value, name, "user")
    for name in CONTEXT_COLUMNS:
        yield from _column(value, name, "user")
    for name in ("chosen", "rejected", "rejected_response", "rejected_messages"):
        yield from _either(value, name, "assistant")


def _stepwise(value: Mapping[str, Any]) -> Iterator[PlacedText]:
    yield from _column(value, "system", "system")
    yield from _either(value, "prompt", "user")
    path, steps = _decoded(("completions",), value["completions"], decode_list)
    yield from (PlacedText((*path, number), "assistant", step) for number, step in enumerate(steps))


def _either(value: Mapping[str, Any], name: str, role: TextRole) -> Iterator[PlacedText]:
    """A column with a text, which has a role, a message, or a list of messages."""
    path, content = _decoded((name,), value.get(name), decode_messages)
    if isinstance(content, str):
        yield PlacedText(path, role, content)
    elif isinstance(content, Mapping):
        yield from _message(path, content)
    else:
        for number, turn in enumerate(content or ()):
            yield from _message((*path, number), turn)


def _message(path: Path, turn: Mapping[str, Any]) -> Iterator[PlacedText]:
    role_key, content_key = ("from", "value") if turn.get("from") is not None else ("role", "content")
    if turn.get(role_key) is None and "value" in turn:  # an answer without a role
        content_key = "value"
    name = ROLES.get(str(turn.get(role_key, "assistant")), "assistant")
    content = turn.get(content_key)
    if name == "tool_call":
        yield from _calls((*path, content_key), content)
        return
    role: TextRole = name  # type: ignore[assignment]  # the other roles of messages are those of texts
    for key in REASONING_KEYS:
        if isinstance(turn.get(key), str):
            yield PlacedText((*path, key), role, turn[key])
    if isinstance(content, str):
        yield PlacedText((*path, content_key), role, content)
    for number, part in enumerate(content if isinstance(content, list) else ()):
        key = content_text_key(part)
        if part.get("type") == "tool_call":
            yield from _calls((*path, content_key, number, key), part[key])
        else:
            yield PlacedText((*path, content_key, number, key), role, part[key])
    for key in ("tool_calls", "function_call"):
        yield from _calls((*path, key), turn.get(key))


def _calls(path: Path, calls: Any) -> Iterator[PlacedText]:
    """The texts in the arguments of calls, not names and numbers."""
    path, calls = _decoded(path, calls, _decode_json)
    for number, call in enumerate(calls) if isinstance(calls, list) else [(None, calls)]:
        if not isinstance(call, Mapping):
            continue
        inner: Path = (*path, number) if number is not None else path
        if isinstance(call.get("function"), Mapping):
            inner, call = (*inner, "function"), call["function"]
        yield from _leaves(*_decoded((*inner, "arguments"), call.get("arguments"), _decode_json))


def _leaves(path: Path, value: Any) -> Iterator[PlacedText]:
    """All texts below a value."""
    if isinstance(value, str):
        yield PlacedText(path, "tool", value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves((*path, number), inner)


def _decoded(path: Path, value: Any, decode: Any) -> tuple[Path, Any]:
    """A value that may stand as JSON in a text, and the path into it."""
    decoded = decode(value)
    return ((*path, _ENCODED), decoded) if isinstance(value, str) and not isinstance(decoded, str) else (path, decoded)


def _decode_json(value: Any) -> Any:
    """A value, or what JSON in its place says; a text that is no JSON stays one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


_OF_FORMAT: dict[Format, Any] = {
    "text": _document,
    "alpaca": lambda value: _single_turn(value, "instruction", "output"),
    "sharegpt": lambda value: _turns(value, "conversations"),
    "messages": lambda value: _turns(value, "messages"),
    "prompt-completion": _prompt_completion,
    "preference": _preference,
    "stepwise": _stepwise,
}
