"""Raw rows as conversations, texts, completions or tokens: which format a row is in, and whether it makes sense."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from danlu.errors import DataError

Format = Literal["text", "alpaca", "sharegpt", "messages", "prompt-completion", "tokenized"]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_call": "tool_call",
    "function_call": "tool_call",
}
"""The role names files use, and what they mean here. A `tool_call` is an assistant turn that is a call as JSON."""

QUESTIONS = {"query": "response", "question": "answer", "instruction": "response"}
"""Column pairs that are one question and its answer, rendered as a conversation."""

_ADDITIONS = ("input", "context")  # columns with what a question is about

_WEIGHTS = ("weight", "train", "training", "loss", "loss_weight")  # keys of a message that say how much it is trained
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = (
    "role", "content", "from", "value", "tool_calls", "function_call", *_THOUGHTS, "name", "tool_call_id", *_WEIGHTS
)  # fmt: skip
"""The keys of a message that are read; others are told of."""
_ROW_WEIGHTS = frozenset({*_WEIGHTS, "weights", "loss_weights", "sample_weight"})  # columns of a row that are not read

_VERDICTS = ("label", "kto_tag", "is_desirable")  # columns that judge an answer
_PART_KEYS = {
    "text": ("text", "value"),
    "reasoning": ("reasoning", "value", "text"),
    "thinking": ("thinking", "value", "text"),
    "tool_call": ("tool_call", "value", "function"),
}
"""Parts of a content by their type: under which keys each has what it says (LLaMA-Factory writes `value`)."""
_PART_ORDER = {"reasoning": 0, "thinking": 0, "text": 1, "tool_call": 2}  # in which chat templates write them
_READ = frozenset(MESSAGE_KEYS)
MOST_DEPTH = 100
TOO_DEEP = f"brackets are nested too deeply, more than {MOST_DEPTH} lists or objects one in the other"
_MOST_WEIGHT = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: system, user, assistant or tool.
        weight: loss weight of its tokens where the row gives one, else None.
        is_context: not trained on by itself, even if it is the assistant's: what a completion follows.
    """

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    is_context: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in an order that makes sense: see `check_order`. Rendered with the chat template.

    `unread` are the keys of its messages that mean nothing here (`MESSAGE_KEYS` do).
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or a part of one: `begins` and `ends` say whether its neighbours are documents of their own."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt (context) and the text to train on, rendered as they stand, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens [S] int32 and their loss weights [S] float32, as the row gives them."""

    tokens: np.ndarray
    weights: np.ndarray


Row = Conversation | Text | Completion | Tokenized


def detect_format(columns: Collection[str], where: str = "row") -> Format:
    """The format of a row with these columns.

    Raises:
        DataError: none fits; the message lists the columns of each format.
    """
    names = set(columns)
    if "input_ids" in names:
        return "tokenized"
    if {"chosen", "rejected"} <= names:
        problem = "these are preference pairs (chosen, rejected), rows for a stage dpo; stages pretrain and sft do not"
        raise DataError(f"{where}: {problem} train on them; keep one answer for each prompt, in any format for sft")
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
        "prompt, completion · query, response · question, answer · instruction, response (context) · input_ids (labels)"
    )


def parse_row(value: Mapping[str, Any], format: Format | Literal["auto"], where: str) -> Row:
    """A raw row as what it means.

    With a fixed format a row of another one is an error, so pass the first row's format for the rest of its file.

    Raises:
        DataError: the row does not fit its format or makes no sense; the message says where, what, and what to do.
    """
    known: Format = detect_format(value.keys(), where) if format == "auto" else format
    refuse_unpaired_preferences(value, known, where)
    try:
        return _PARSERS[known](value, where)
    except KeyError as error:
        raise DataError(_misfit(value, known, str(error.args[0]), where)) from None


def refuse_unpaired_preferences(value: Mapping[str, Any], format: Format, where: str) -> None:
    """Refuse unpaired preferences: an answer with a column that says whether it is a good one (TRL's KTO rows).

    A column of other values, or beside plain text, is a label of something else.

    Raises:
        DataError: the message names the column and the stage such rows are for.
    """
    if format in ("text", "tokenized"):
        return
    for name in _VERDICTS:
        verdict = value.get(name)
        if (
            verdict in (-1, 0, 1)  # False and True are 0 and 1
            if isinstance(verdict, bool | int | float)
            else isinstance(verdict, str) and verdict.strip().lower() in ("true", "false", "0", "1", "-1")
        ):
            raise DataError(
                f"{where}: '{name}' ({_brief(verdict)}) judges the answer: unpaired preferences are rows for a stage "
                "kto; stages pretrain and sft would train the bad answers like the good ones. Keep the rows with "
                "good answers and remove the column; remove it too if it means something else"
            )


def unread_keys(value: Mapping[str, Any], row: Row) -> list[str]:
    """What a row holds beside its messages and in them that seems to be meant for training, and is not read."""
    columns = [f"{name} (a column)" for name in _ROW_WEIGHTS & value.keys() if value[name] is not None]
    return sorted(columns) + (list(row.unread) if isinstance(row, Conversation) else [])


def _misfit(value: Mapping[str, Any], format: Format, missing: str, where: str) -> str:
    problem = f"{where}: no column '{missing}', which rows of format {format} have; the columns are {', '.join(value)}"
    try:
        other = detect_format(value.keys(), where)
    except DataError:
        return problem
    if other == format:
        return problem
    return f"{problem}. This row looks like {other}: put rows of different formats in files of their own"


# -- the formats ------------------------------------------------------------------------------------------------------


def _text(value: Mapping[str, Any], where: str) -> Text:
    text = value["text"]
    if not isinstance(text, str):
        raise DataError(f"{where}: 'text' must be a string, not {_kind(text)}")
    begins, ends = value.get("document_begins", True), value.get("document_ends", True)
    if not text.strip() and begins and ends:
        raise DataError(f"{where}: 'text' is empty; remove the row")
    return Text(text, bool(begins), bool(ends))


def _alpaca(value: Mapping[str, Any], where: str) -> Conversation:
    answer = _string(value["output"], "output", where)
    return _single_turn(value, _string(value["instruction"], "instruction", where), answer, where)


def _prompt_completion(value: Mapping[str, Any], where: str) -> Conversation | Completion:
    for ask, reply in QUESTIONS.items():
        if ask in value and reply in value and "completion" not in value:
            question, answer = _string(value[ask], ask, where), _string(value[reply], reply, where)
            return _single_turn(value, question, answer, where)
    prompt, completion = _decoded_messages(value["prompt"]), _decoded_messages(value["completion"])
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise DataError(f"{where}: 'completion' is empty, so there is nothing to train on; remove the row")
        return Completion(prompt, completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        kinds = f"{_kind(prompt)} and {_kind(completion)}"
        raise DataError(
            f"{where}: 'prompt' and 'completion' must both be strings or both be lists of messages, not {kinds}"
        )
    return _conversation([*prompt, *completion], value, where, context=len(prompt))


def _single_turn(value: Mapping[str, Any], question: str, answer: str, where: str) -> Conversation:
    """A question and its answer after the earlier turns in `history`, a list of [question, answer]."""
    for name in _ADDITIONS:
        if addition := _string(value.get(name) or "", name, where):
            question = f"{question}\n{addition}" if question else addition
    messages = []
    if system := _string(value.get("system") or "", "system", where):
        messages.append(Message("system", system))
    for pair in _decoded(value.get("history")) or ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{where}: 'history' must be a list of [question, answer], but has {_brief(pair)}")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    messages += [Message("user", question), Message("assistant", answer)]
    return Conversation(check_order(messages, where), _tools(value.get("tools"), where))


def _sharegpt(value: Mapping[str, Any], where: str) -> Conversation:
    return _conversation(value["conversations"], value, where)


def _messages(value: Mapping[str, Any], where: str) -> Conversation:
    return _conversation(value["messages"], value, where)


def _tokenized(value: Mapping[str, Any], where: str) -> Tokenized:
    tokens = _integers(value["input_ids"], "input_ids", where)
    weights = np.ones(len(tokens), np.float32)
    for name in ("labels", "completion_mask", "assistant_masks", "loss_mask", "attention_mask"):
        if value.get(name) is None:
            continue
        column = _integers(value[name], name, where)
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
    "sharegpt": _sharegpt,
    "messages": _messages,
    "prompt-completion": _prompt_completion,
    "tokenized": _tokenized,
}


# -- conversations ----------------------------------------------------------------------------------------------------


def _conversation(turns: Any, value: Mapping[str, Any], where: str, context: int = 0) -> Conversation:
    """Messages in the order of a row; the first `context` of them are there for what follows."""
    dicts = _dicts(_decoded(turns), where)
    messages = [
        _message(turn, f"{where} message {number}", is_context=number <= context)
        for number, turn in enumerate(dicts, 1)
    ]
    if (system := _string(value.get("system") or "", "system", where)) and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    keys = tuple(sorted({key for turn in dicts for key in turn.keys() - _READ if turn[key] is not None}))
    return Conversation(check_order(messages, where), _tools(value.get("tools"), where), keys)


def _dicts(turns: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"{where}: a conversation must be a list of messages (objects), not {_kind(turns)}")
    return turns


def _message(turn: Mapping[str, Any], where: str, is_context: bool) -> Message:
    # In columnar files a message has every key that any message has, with null where it has none.
    role_key, content_key = ("from", "value") if turn.get("from") is not None else ("role", "content")
    name = turn.get(role_key)
    if name is None:
        raise DataError(
            f"{where}: a message needs role and content (or from and value); it has {', '.join(turn) or 'nothing'}"
        )
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{where}: unknown role {_brief(name)}. Known roles: {', '.join(ROLES)}")
    content, thought, said = _content(turn.get(content_key), where)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if role == "tool_call":
        role, calls, content = "assistant", content, ""
    reasoning = next((turn[key] for key in _THOUGHTS if turn.get(key)), None)
    if (thought or said) and role != "assistant":
        raise DataError(f"{where}: reasoning and tool_call parts are the assistant's, not of role {_brief(name)}")
    for what, part, key in (("reasoning", thought, reasoning), ("tool calls", said, calls)):
        if part and key:
            raise DataError(f"{where}: {what} both as a part of the content and as a key of the message; keep one")
    return Message(
        role,
        content,
        _tool_calls(said or calls, where) if said or calls else None,
        thought or _text_of(reasoning, "reasoning", where),
        _text_of(turn.get("name"), "name", where),
        _text_of(turn.get("tool_call_id"), "tool_call_id", where),
        _weight(turn, where),
        is_context,
    )


def _text_of(value: Any, key: str, where: str) -> str | None:
    """A string that a message may have or not."""
    return None if value is None else _string(value, key, where)


def _content(content: Any, where: str) -> tuple[str, str | None, list[Any]]:
    """The text of a content, the thought and the tool calls among its parts; nothing for None."""
    if isinstance(content, str):
        return content, None, []
    if content is None:
        return "", None, []
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise DataError(f"{where}: content must be a string or a list of text parts, not {_kind(content)}")
    found: list[tuple[str, Any]] = []
    for part in content:
        kind = part.get("type") or "text"
        keys = _PART_KEYS.get(kind) if isinstance(kind, str) else None
        if keys is None:
            known = ", ".join(_PART_KEYS)
            raise DataError(f"{where}: content of type {_brief(kind)} cannot be trained on; the types are {known}")
        said = next((part[key] for key in keys if part.get(key) is not None), None)
        if said is None or (kind != "tool_call" and not isinstance(said, str)):
            what = f"is {_kind(said)}" if said is not None else f"has {', '.join(part)}"
            raise DataError(f"{where}: a content part of type {kind} needs a string as {' or '.join(keys)}; it {what}")
        if found and _PART_ORDER[kind] < _PART_ORDER[found[-1][0]]:
            raise DataError(
                f"{where}: a {kind} part behind a {found[-1][0]} part: chat templates write reasoning, text and tool "
                "calls in this order; begin a new message where the order begins again"
            )
        found.append((kind, said))
    text = "".join(said for kind, said in found if kind == "text")
    thought = "".join(said for kind, said in found if kind in ("reasoning", "thinking"))
    calls = [_parsed(said, "a tool call", where) for kind, said in found if kind == "tool_call"]
    return text, thought or None, calls


def _weight(turn: Mapping[str, Any], where: str) -> float | None:
    """The loss weight a message gives itself, as a number or a bool under one of the names in use."""
    found: dict[str, float] = {}
    for key in _WEIGHTS:
        given = turn.get(key)
        if given is None:
            continue
        if not isinstance(given, bool | int | float) or not 0 <= given <= _MOST_WEIGHT:
            raise DataError(f"{where}: '{key}' must be true, false or a number from 0 up, not {_brief(given)}")
        found[key] = float(given)
    if len(set(found.values())) > 1:
        said = " and ".join(f"'{key}' {weight:g}" for key, weight in found.items())
        raise DataError(f"{where}: {said} say different things about the loss of one message; keep one of them")
    return next(iter(found.values()), None)


def _tool_calls(calls: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Calls as `{"type": "function", "function": {"name", "arguments": {...}}}`, which chat templates expect."""
    calls = _parsed(calls, "a tool call", where)
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call needs a name and arguments, not {_brief(call)}")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else _parsed(arguments, "the arguments of a tool call", where)
        kept = {"id": call["id"]} if call.get("id") else {}
        found.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return tuple(found)


def _tools(tools: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """Tools as `{"type": "function", "function": {...}}`; None when there are none."""
    if not tools:
        return None
    tools = _parsed(tools, "'tools'", where)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: 'tools' must be a list of objects, not {_kind(tools)}")
    wrapped = (
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    )
    return tuple(dict(tool) for tool in wrapped) or None


def check_order(messages: Iterable[Message], where: str) -> tuple[Message, ...]:
    """The messages, if they alternate: system messages first, then user turns, each answered by the assistant.

    Between a user turn and the answer there may be tool calls (assistant) with their results (tool). A last user turn
    may go unanswered.

    Raises:
        DataError: anything else; the message says which rule and what to do.
    """
    checked = tuple(messages)
    previous: Message | None = None
    for number, message in enumerate(checked, 1):
        if problem := _order_problem(previous, message):
            raise DataError(f"{where} message {number}: {problem}")
        previous = message
    if not any(message.role == "assistant" for message in checked):
        raise DataError(f"{where}: no assistant message, so there is nothing to train on; remove the row")
    return checked


def _order_problem(previous: Message | None, message: Message) -> str | None:
    before = previous.role if previous else "nothing"
    match message.role:
        case "system" if before not in ("nothing", "system"):
            return "a system message must come first; move it to the front"
        case "user":
            if before == "user":
                return "two user turns in a row; join them into one, or add the assistant's answer between them"
            if before == "tool":
                return "a tool result must be followed by the assistant, not by the user; add the assistant's answer"
        case "assistant":
            if before in ("nothing", "system"):
                return "the conversation starts with the assistant; add the user's turn before it or remove this one"
            if before == "assistant" and previous is not None and not previous.tool_calls:
                return "two assistant turns in a row; join them into one, or add the user's turn between them"
            if not message.content.strip() and not message.tool_calls:
                return "the assistant's answer is empty; remove the row or fill the answer in"
        # The call itself may be a part of the assistant's text.
        case "tool" if before not in ("tool", "assistant"):
            return f"a tool result must follow the assistant's call, not {before}; add the call or remove the result"
    return None


# -- values -----------------------------------------------------------------------------------------------------------


def is_too_deep(value: Any) -> bool:
    """Whether more than `MOST_DEPTH` lists and objects lie one in the other: too deep to be sent or rendered."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _decoded(value: Any) -> Any:
    """Lists in a csv cell are written as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError):
            return value  # a text that merely starts with a bracket; whoever needs a list says so
        return value if is_too_deep(decoded) else decoded
    return value


def _decoded_messages(value: Any) -> Any:
    """Messages that a csv cell holds as JSON. Other text stays as it is, even if it is JSON: it may be a prompt."""
    decoded = _decoded(value)
    is_messages = isinstance(decoded, list) and decoded and all(isinstance(one, Mapping) for one in decoded)
    return decoded if is_messages or not isinstance(value, str) else value


def _parsed(value: Any, what: str, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: {what} must be JSON: {error.msg} at character {error.pos} of {value[:80]!r}"
        ) from error
    except RecursionError:
        raise DataError(f"{where}: {what} cannot be read: {TOO_DEEP}") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where}: {what} must be JSON: {value[:80]!r} holds a number of too many digits") from error
    if is_too_deep(parsed):
        raise DataError(f"{where}: {what} cannot be read: {TOO_DEEP}")
    return parsed


def _string(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: '{column}' must be a string, not {_kind(value)}")
    return value


def _integers(value: Any, column: str, where: str) -> np.ndarray:
    try:
        array = np.asarray(_decoded(value))
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise DataError(f"{where}: '{column}' must be a list of integers")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise DataError(f"{where}: '{column}' has {array[np.abs(array).argmax()]}, which is no token id")
    return array.astype(np.int32)


def _brief(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
