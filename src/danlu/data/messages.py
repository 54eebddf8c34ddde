"""Conversations: messages as files write them, under one set of names and in an order that makes sense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from danlu.core.errors import DataError
from danlu.core.spelling import did_you_mean
from danlu.data.column_values import abbreviate, decode_json, decode_list, require_string, type_name

_ROLE_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model"),
    "tool": ("tool", "tool_response", "observation", "function", "function_response"),
    "tool_call": ("tool_call", "function_call"),
}
"""The names that files use for each role. A `tool_call` is an assistant turn that is a call as JSON."""
ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in names}
WEIGHT_KEYS = ("weight", "train", "training", "loss", "loss_weight")
"""The keys of a message that say how much it is trained."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The keys of a message for the thought before its text."""
MESSAGE_KEYS = (
    "role", "content", "from", "value", "tool_calls", "function_call", *REASONING_KEYS, "name", "tool_call_id",
    *WEIGHT_KEYS
)  # fmt: skip
"""The keys of a message that are read; others are reported."""
_PART_KEYS = {
    "text": ("text", "value"),
    "reasoning": ("reasoning", "value", "text"),
    "thinking": ("thinking", "value", "text"),
    "tool_call": ("tool_call", "value", "function"),
}
"""The keys for the text of a part of a content, by the part's type (LLaMA-Factory writes `value`)."""
_PART_ORDER = {"reasoning": 0, "thinking": 0, "text": 1, "tool_call": 2}  # in which chat templates write them
_READ_KEYS = frozenset(MESSAGE_KEYS)
_MAX_WEIGHT = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: system, user, assistant or tool.
        weight: loss weight of its tokens where the row gives one, else None.
        is_context: not trained on by itself, even if it is the assistant's: a message before a completion.
        begun: of an answer that goes on with a turn which the prompt has begun, the characters of its content that are
            the prompt's, and not trained.
    """

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    is_context: bool = False
    begun: int = 0

    def continued_by(
        self, content: str, tool_calls: tuple[dict[str, Any], ...] | None = None, weight: float | None = None
    ) -> Message:
        """An answer that goes on with this message, which a prompt has begun."""
        return replace(
            self,
            content=self.content + content,
            tool_calls=tool_calls,
            weight=weight,
            is_context=False,
            begun=len(self.content),
        )

    @property
    def beginning(self) -> Message:
        """The part of it that the prompt has begun."""
        return replace(self, content=self.content[: self.begun], tool_calls=None, is_context=True, begun=0)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in an order that makes sense: see `check_order`. Rendered with the chat template.

    `unread` are the keys of its messages that mean nothing here (`MESSAGE_KEYS` do). `step_stops`, of a last answer
    that is judged step by step: where each step ends in its content, in characters.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    unread: tuple[str, ...] = field(default=(), compare=False)
    step_stops: tuple[int, ...] = ()


def parse_conversation(turns: Any, value: Mapping[str, Any], where: str, context: int = 0) -> Conversation:
    """Parses the messages of a row in order, with an answer; the first `context` of them are context."""
    conversation = parse_turns(turns, value, where, context)
    _require_answer(conversation.messages, where)
    return conversation


def parse_turns(turns: Any, value: Mapping[str, Any], where: str, context: int = 0) -> Conversation:
    """The same of a conversation that need not have an answer: a prompt."""
    turns = decode_list(turns)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"{where}: a conversation must be a list of messages (objects), not {type_name(turns)}")
    messages = [_message(turn, f"{where} message {n}", is_context=n <= context) for n, turn in enumerate(turns, 1)]
    messages = _with_begun_joined(_with_calls_joined(messages, turns), where)
    system = require_string(value.get("system") or "", "system", where)
    if system and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    keys = tuple(sorted({key for turn in turns for key in turn.keys() - _READ_KEYS if turn[key] is not None}))
    return Conversation(check_order(messages, where), parse_tools(value.get("tools"), where), keys)


def _with_calls_joined(messages: Sequence[Message], turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages in which a `function_call` turn behind a text of the assistant is the call of that text's message.

    turns: those that the messages were made of.
    """
    joined = list[Message]()
    for message, turn in zip(messages, turns, strict=True):
        before = joined[-1] if joined else None
        is_call = ROLES.get(turn.get("from") or turn.get("role") or "") == "tool_call"
        if is_call and before is not None and _takes_call(before, message):
            joined[-1] = replace(before, tool_calls=message.tool_calls)
        else:
            joined.append(message)
    return joined


def _takes_call(text: Message, call: Message) -> bool:
    """Whether a call can be that of the message before it: of the assistant's, trained alike."""
    is_text = text.role == "assistant" and not text.tool_calls
    return is_text and (text.weight, text.is_context) == (call.weight, call.is_context)


def _with_begun_joined(messages: Sequence[Message], where: str) -> list[Message]:
    """Messages in which the answer to a prompt that ends in the assistant's turn goes on with that turn."""
    joined = list[Message]()
    for number, message in enumerate(messages, 1):
        before = joined[-1] if joined else None
        if before is not None and before.is_context and not message.is_context and _is_begun(before, message):
            joined[-1] = _continued(before, message, f"{where} message {number}")
        else:
            joined.append(message)
    return joined


def _is_begun(begun: Message, message: Message) -> bool:
    """Whether a message of the answer goes on with the last one of its prompt; after a call comes a turn of its own."""
    of_assistant = begun.role == message.role == "assistant"
    return of_assistant and not begun.tool_calls and bool(begun.content.strip())


def _continued(begun: Message, message: Message, where: str) -> Message:
    """The two as one message. Raises DataError for an answer that cannot stand behind a text of its own turn."""
    if not message.content.strip() and not message.tool_calls:
        raise DataError(f"{where}: the assistant's answer is empty; remove the row or fill the answer in")
    if message.reasoning_content:
        raise DataError(
            f"{where}: the answer goes on with the turn that the prompt has begun, and has a thought (reasoning). Chat "
            "templates write a thought before the text of a turn: write it into the turn that is begun, or end the "
            "prompt with the user's turn"
        )
    if begun.weight:
        raise DataError(
            f"{where}: the prompt has begun this turn, and gives its beginning a loss weight; a beginning is context. "
            "Remove the weight, or put the beginning into the answer"
        )
    return begun.continued_by(message.content, message.tool_calls, message.weight)


def turn_of(message: Message) -> dict[str, Any]:
    """A message as chat templates see it: only the keys it has, the thought under both names in use."""
    optional = {
        "tool_calls": list(message.tool_calls or ()),
        "reasoning_content": message.reasoning_content,
        "thinking": message.reasoning_content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": message.content} | {k: value for k, value in optional.items() if value}


def _message(turn: Mapping[str, Any], where: str, is_context: bool) -> Message:
    # In columnar files a message has every key that any message has, with null where it has none.
    role_key, content_key = ("from", "value") if turn.get("from") is not None else ("role", "content")
    name = turn.get(role_key)
    if name is None:
        keys = list(turn)
        named = f". Or name them: data.columns: {{role_tag: {keys[0]}, content_tag: {keys[1]}}}" if keys[1:] else ""
        raise DataError(
            f"{where}: a message needs role and content (or from and value); it has {', '.join(keys) or 'nothing'}"
            f"{named}"
        )
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        hint = did_you_mean(name, list(ROLES)) if isinstance(name, str) else ""
        known = ", ".join(ROLES)
        raise DataError(f"{where}: unknown role {abbreviate(name)}. Known roles: {known}{hint and f'.{hint}'}")
    content, content_reasoning, content_calls = _content(turn.get(content_key), where)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if role == "tool_call":
        role, calls, content = "assistant", content, ""
    reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key)), None)
    if (content_reasoning or content_calls) and role != "assistant":
        raise DataError(f"{where}: reasoning and tool_call parts are the assistant's, not of role {abbreviate(name)}")
    for what, part, key in (("reasoning", content_reasoning, reasoning), ("tool calls", content_calls, calls)):
        if part and key:
            raise DataError(f"{where}: {what} both as a part of the content and as a key of the message; keep one")
    return Message(
        role,
        content,
        _tool_calls(content_calls or calls, where) if content_calls or calls else None,
        content_reasoning or _optional_string(reasoning, "reasoning", where),
        _optional_string(turn.get("name"), "name", where),
        _optional_string(turn.get("tool_call_id"), "tool_call_id", where),
        _weight(turn, where),
        is_context,
    )


def _optional_string(value: Any, key: str, where: str) -> str | None:
    """A string that a message may have or not."""
    return None if value is None else require_string(value, key, where)


def _content(content: Any, where: str) -> tuple[str, str | None, list[Any]]:
    """(text, reasoning, tool calls) of a content, which is a string or a list of parts; no text for None."""
    if isinstance(content, str):
        return content, None, []
    if content is None:
        return "", None, []
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise DataError(f"{where}: content must be a string or a list of text parts, not {type_name(content)}")
    parts: list[tuple[str, Any]] = []  # type, what it says
    for part in content:
        kind = part.get("type") or "text"
        keys = _PART_KEYS.get(kind) if isinstance(kind, str) else None
        if keys is None:
            known = ", ".join(_PART_KEYS)
            raise DataError(f"{where}: content of type {abbreviate(kind)} cannot be trained on; the types are {known}")
        value = next((part[key] for key in keys if part.get(key) is not None), None)
        if value is None or (kind != "tool_call" and not isinstance(value, str)):
            what = f"is {type_name(value)}" if value is not None else f"has {', '.join(part)}"
            raise DataError(f"{where}: a content part of type {kind} needs a string as {' or '.join(keys)}; it {what}")
        if parts and _PART_ORDER[kind] < _PART_ORDER[parts[-1][0]]:
            raise DataError(
                f"{where}: a {kind} part behind a {parts[-1][0]} part: chat templates write reasoning, text and tool "
                "calls in this order; begin a new message where the order begins again"
            )
        parts.append((kind, value))
    text = "".join(value for kind, value in parts if kind == "text")
    reasoning = "".join(value for kind, value in parts if kind in ("reasoning", "thinking"))
    calls = [decode_json(value, "a tool call", where) for kind, value in parts if kind == "tool_call"]
    return text, reasoning or None, calls


def content_text_key(part: Mapping[str, Any]) -> str:
    """The key with the text of a part of a content, which `parse_turns` has let pass."""
    return next(key for key in _PART_KEYS[part.get("type") or "text"] if part.get(key) is not None)


def _weight(turn: Mapping[str, Any], where: str) -> float | None:
    """The loss weight a message gives itself, as a number or a bool under one of the names in use."""
    weights: dict[str, float] = {}
    for key in WEIGHT_KEYS:
        given = turn.get(key)
        if given is None:
            continue
        if not isinstance(given, bool | int | float) or not 0 <= given <= _MAX_WEIGHT:
            raise DataError(f"{where}: '{key}' must be true, false or a number from 0 up, not {abbreviate(given)}")
        weights[key] = float(given)
    if len(set(weights.values())) > 1:
        listed = " and ".join(f"'{key}' {weight:g}" for key, weight in weights.items())
        raise DataError(f"{where}: {listed} say different things about the loss of one message; keep one of them")
    return next(iter(weights.values()), None)


def _tool_calls(calls: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Calls as `{"type": "function", "function": {"name", "arguments": {...}}}`, which chat templates expect."""
    calls = decode_json(calls, "a tool call", where)
    normalized = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call needs a name and arguments, not {abbreviate(call)}")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else decode_json(arguments, "the arguments of a tool call", where)
        call_id = {"id": call["id"]} if call.get("id") else {}
        named = {"name": function["name"], "arguments": arguments}
        normalized.append({**call_id, "type": "function", "function": named})
    return tuple(normalized)


def parse_tools(tools: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """Tools as `{"type": "function", "function": {...}}`; None when there are none."""
    if not tools:
        return None
    tools = decode_json(tools, "'tools'", where)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: 'tools' must be a list of objects, not {type_name(tools)}")
    wrapped = (
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    )
    return tuple(dict(tool) for tool in wrapped) or None


def check_turn_order(messages: Iterable[Message], where: str) -> tuple[Message, ...]:
    """The messages, if `check_order` allows them and one is the assistant's. Raises DataError."""
    checked = check_order(messages, where)
    _require_answer(checked, where)
    return checked


def check_order(messages: Iterable[Message], where: str) -> tuple[Message, ...]:
    """Returns the messages, if they alternate: system messages first, then user turns, each answered by the assistant.

    Between a user turn and the answer there may be tool calls (assistant) with their results (tool). A last user turn
    may go unanswered.

    Raises:
        DataError: anything else; the message names the rule and a remedy.
    """
    checked = tuple(messages)
    previous: Message | None = None
    for number, message in enumerate(checked, 1):
        if problem := _order_problem(previous, message):
            raise DataError(f"{where} message {number}: {problem}")
        previous = message
    return checked


def _require_answer(messages: Iterable[Message], where: str) -> None:
    if not any(message.role == "assistant" for message in messages):
        raise DataError(f"{where}: no assistant message, so there is nothing to train on; remove the row")


def _order_problem(previous: Message | None, message: Message) -> str | None:
    """Why `message` cannot follow `previous`, or cannot begin a conversation; None if it can."""
    previous_role = previous.role if previous else "nothing"
    match message.role:
        case "system" if previous_role not in ("nothing", "system"):
            return "a system message must come first; move it to the front"
        case "user":
            if previous_role == "user":
                return "two user turns in a row; join them into one, or add the assistant's answer between them"
            if previous_role == "tool":
                return "a tool result must be followed by the assistant, not by the user; add the assistant's answer"
        case "assistant":
            if previous_role in ("nothing", "system"):
                return "the conversation starts with the assistant; add the user's turn before it or remove this one"
            if previous_role == "assistant" and previous is not None and not previous.tool_calls:
                return "two assistant turns in a row; join them into one, or add the user's turn between them"
            if not message.content.strip() and not message.tool_calls:
                return "the assistant's answer is empty; remove the row or fill the answer in"
        # The call itself may be a part of the assistant's text.
        case "tool" if previous_role not in ("tool", "assistant"):
            problem = f"a tool result must follow the assistant's call, not {previous_role}"
            return f"{problem}; add the call or remove the result"
    return None
