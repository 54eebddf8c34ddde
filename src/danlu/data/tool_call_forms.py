"""The forms in which families of models write calls of tools: readers of one call, or of several in one block.

A reader is given the text, where a mark of its form stands in it, whether the answer has ended, and the properties of
the tools' arguments. It returns calls (and text that is none) with the place behind them; a call that has not ended
raises `Incomplete` while more may come, and is malformed afterwards.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from danlu.core.types import MalformedCall, ToolCall

_LITERALS = ("true", "false", "null", "-")
_NUMBER_GOES_ON = re.compile(r"\.|[eE][+-]?")
_BARE_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_GLM45_NAME_END = re.compile(r"<arg_key>|</tool_call>|\n")
_ENDS = re.compile(r"(?:\s|<\|eot_id\|>|<\|eom_id\|>|<\|im_end\|>|</s>)*")


Call = ToolCall | MalformedCall
Parts = list[str | Call]
"""The text and the calls of an answer, in their order."""
Properties = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments of each tool, by its name."""


class Incomplete(Exception):
    """A call has not ended yet; never leaves the readers of answers."""


def properties_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of arguments by the names of tools, from JSON schemas in OpenAI's form."""
    properties: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            given = parameters.get("properties") if isinstance(parameters, Mapping) else None
            properties[name] = given if isinstance(given, Mapping) else {}
    return properties


def as_json(value: Any) -> str:
    """A value as JSON, letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def longest_beginning(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters of a text may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    return next(
        (size for size in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-size:]) for m in marks)), 0
    )


# -- JSON --------------------------------------------------------------------------------------------------------------


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _json(text: str, at: int, ended: bool) -> tuple[Any, int]:
    """A JSON value and the place behind it.

    Raises Incomplete where more of it may come, ValueError where it is none.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        is_open = not rest.strip() or error.msg.startswith("Unterminated string") or "escape" in error.msg
        is_number = text[error.pos - 1 : error.pos].isdecimal() and _NUMBER_GOES_ON.fullmatch(rest) is not None
        if not ended and (is_open or is_number or any(literal.startswith(rest) for literal in _LITERALS)):
            raise Incomplete from None
        raise
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _call_of(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall('a call is {"name": the tool, "arguments": {..}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments of {value['name']} are no JSON object")
    return ToolCall(value["name"], arguments)


def _named(name: str, arguments: Any) -> Call:
    return _call_of({"name": name.strip(), "arguments": arguments})


def _no_json(error: ValueError) -> MalformedCall:
    return MalformedCall(f"the call is no JSON: {error}")


def _skip(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _behind(text: str, at: int, mark: str, ended: bool) -> int | None:
    """The place behind a mark that stands next, white space aside; None where another text does."""
    place = _skip(text, at)
    if text.startswith(mark, place):
        return place + len(mark)
    if not ended and mark.startswith(text[place:]):
        raise Incomplete
    return None


def _find(text: str, mark: str, at: int, ended: bool) -> int:
    """The place of a mark, or the end of the answer where it has none."""
    place = text.find(mark, at)
    if place < 0 and not ended:
        raise Incomplete
    return place if place >= 0 else len(text)


# -- <tool_call> -------------------------------------------------------------------------------------------------------


def read_tag(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """Reads a call behind `<tool_call>` where the family is not known: the text behind it decides."""
    inside = text[_skip(text, at + len("<tool_call>")) :]
    if not ended and (not inside or "<function=".startswith(inside)):
        raise Incomplete
    if inside.startswith("<function="):
        return read_qwen3_coder(text, at, ended, properties)
    if re.match(r"[\w.-]+\s*(<arg_key>|</tool_call>)", inside):
        return read_glm45(text, at, ended, properties)
    if not ended and re.fullmatch(r"[\w.-]+\s*(<[\w/]*)?", inside):
        raise Incomplete
    return read_hermes(text, at, ended, properties)


def read_hermes(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>` of Hermes and Qwen."""
    begin = _skip(text, at + len("<tool_call>"))
    try:
        value, stop = _json(text, begin, ended)
    except ValueError as error:
        return [_no_json(error)], _find(text, "</tool_call>", begin, ended) + len("</tool_call>")
    if (closed := _behind(text, stop, "</tool_call>", ended)) is not None:
        return [_call_of(value)], closed
    end = _find(text, "</tool_call>", stop, ended)
    if text[stop:end].strip():
        return [MalformedCall("the call is no JSON: text stands behind its object")], end + len("</tool_call>")
    return [_call_of(value)], end


def read_glm45(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """`<tool_call>NAME<arg_key>..</arg_key><arg_value>..</arg_value></tool_call>` of GLM-4.5 and later."""
    place = at + len("<tool_call>")
    end_of_name = _GLM45_NAME_END.search(text, place)
    if end_of_name is None and not ended:
        raise Incomplete
    stop = end_of_name.start() if end_of_name else len(text)
    name, place = text[place:stop].strip(), stop
    arguments: dict[str, Any] = {}
    while (begin := _behind(text, place, "<arg_key>", ended)) is not None:
        key_end = _find(text, "</arg_key>", begin, ended)
        value_begin = _behind(text, key_end + len("</arg_key>"), "<arg_value>", ended)
        if value_begin is None:
            return [MalformedCall(f"an argument of {name} has no value")], _find(text, "</tool_call>", key_end, ended)
        value_end = _end_of_value(text, value_begin, "</arg_value>", ("<arg_key>", "</tool_call>"), ended)
        key = text[begin:key_end].strip()
        arguments[key] = _typed(text[value_begin:value_end], properties.get(name, {}).get(key), or_json=True)
        place = value_end + len("</arg_value>")
    return _closed([_named(name, arguments)], text, place, "</tool_call>", ended)


def _closed(calls: Parts, text: str, at: int, mark: str, ended: bool) -> tuple[Parts, int]:
    """Calls with the place behind the mark that closes them, or malformed where other text stands there."""
    if (end := _behind(text, at, mark, ended)) is not None:
        return calls, end
    if at >= len(text) or not text[at:].strip():
        return calls, len(text)
    return [MalformedCall(f"a call ends in {mark}")], min(len(text), _find(text, mark, at, ended) + len(mark))


# -- XML ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tags:
    """The tags of calls in XML: patterns of those with names, texts of the others."""

    block: tuple[str, str]
    function: re.Pattern[str]
    function_end: str
    parameter: re.Pattern[str]
    next_tags: tuple[str, str]  # how a function and a parameter begin


_QWEN3_CODER = _Tags(
    ("<tool_call>", "</tool_call>"),
    re.compile(r"<function=([^>]+)>"),
    "</function>",
    re.compile(r"<parameter=([^>]+)>"),
    ("<function=", "<parameter="),
)
_MINIMAX = _Tags(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    re.compile(r"""<invoke name=["']?([^>"']+)["']?>"""),
    "</invoke>",
    re.compile(r"""<parameter name=["']?([^>"']+)["']?>"""),
    ("<invoke name=", "<parameter name="),
)


def read_qwen3_coder(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """`<tool_call><function=NAME><parameter=KEY>..</parameter></function></tool_call>` of Qwen3-Coder."""
    return _read_xml(text, at, ended, properties, _QWEN3_CODER)


def read_minimax(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">..</parameter></invoke></minimax:tool_call>`."""
    return _read_xml(text, at, ended, properties, _MINIMAX)


def _read_xml(text: str, at: int, ended: bool, properties: Properties, tags: _Tags) -> tuple[Parts, int]:
    opened, closed = tags.block
    in_block = text.startswith(opened, at)
    place = at + len(opened) if in_block else at
    calls: Parts = []
    while (begin := _tag(text, place, tags.function, tags.next_tags[0], ended)) is not None:
        name = begin[1].strip()
        arguments: dict[str, Any] = {}
        place = begin.end()
        while (argument := _tag(text, place, tags.parameter, tags.next_tags[1], ended)) is not None:
            end = _end_of_value(text, argument.end(), "</parameter>", (tags.next_tags[1], tags.function_end), ended)
            value = text[argument.end() : end].removeprefix("\n").removesuffix("\n")
            key = argument[1].strip()
            arguments[key] = _typed(value, properties.get(name, {}).get(key), or_json=False)
            place = end + len("</parameter>")
        read, place = _closed([_named(name, arguments)], text, place, tags.function_end, ended)
        calls += read
        if not in_block:
            end_of_block = _behind(text, place, closed, ended)  # some answers forget to open the block
            return calls, place if end_of_block is None else end_of_block
    if not calls:
        end = _find(text, closed, place, ended)
        return [MalformedCall(f"a call is {tags.next_tags[0]}NAME>..")], min(len(text), end + len(closed))
    return _closed(calls, text, place, closed, ended)


def _tag(text: str, at: int, pattern: re.Pattern[str], begins: str, ended: bool) -> re.Match[str] | None:
    """A tag with a name that stands next, white space aside."""
    place = _skip(text, at)
    match = pattern.match(text, place)
    rest = text[place:]
    if match is None and not ended and (begins.startswith(rest) or (rest.startswith(begins) and ">" not in rest)):
        raise Incomplete
    return match


def _end_of_value(text: str, at: int, closed: str, followers: Sequence[str], ended: bool) -> int:
    """Returns the end of a value.

    It is at the first closing tag that another tag of the call follows; a value may have such a tag in its text.
    """
    place = text.find(closed, at)
    first = place
    while place >= 0:
        behind = text[_skip(text, place + len(closed)) :]
        if behind.startswith(tuple(followers)) or (ended and not behind):
            return place
        if not ended and any(follower.startswith(behind) for follower in followers):
            raise Incomplete
        place = text.find(closed, place + 1)
    if not ended:
        raise Incomplete
    return first if first >= 0 else len(text)


def _typed(value: str, schema: Any, *, or_json: bool) -> Any:
    """Converts an argument that is written as text to the type in its schema.

    or_json: whether an argument without a schema is parsed as JSON where possible; else it is the text.
    """
    types = _types(schema)
    if not types:
        return _json_or_text(value) if or_json else value
    written = value.strip()
    if types - {"string"} and written.lower() in ("null", "none"):
        return None
    readers: dict[str, Callable[[str], Any]] = {"integer": int, "number": _number, "boolean": _boolean}
    for kind in ("integer", "number", "boolean", "object", "array"):
        if kind in types:
            try:
                return readers.get(kind, _DECODER.decode)(written)
            except (ValueError, RecursionError):
                continue
    return value


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type") or ()
    types = {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(choice)
    return types


def _number(value: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return int(number) if number.is_integer() and "." not in value and "e" not in value.lower() else number


def _boolean(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(value)
    return value.lower() == "true"


def _json_or_text(value: str) -> Any:
    try:
        return _DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


# -- Mistral -----------------------------------------------------------------------------------------------------------


def read_mistral(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """`[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or of newer tokenizers `[TOOL_CALLS]NAME[ARGS]{..}`, also
    without `[ARGS]` and with an id between `[CALL_ID]` and it."""
    begin = _skip(text, at + len("[TOOL_CALLS]"))
    if begin == len(text) and not ended:
        raise Incomplete
    name = ""
    if not text.startswith("[", begin):
        head = text.find("{", begin)
        if head < 0 and not ended:
            raise Incomplete
        if head < 0:
            return [MalformedCall("a call is NAME[ARGS]{..}")], len(text)
        name, begin = re.split(r"\[CALL_ID\]|\[ARGS\]", text[begin:head])[0], head
    try:
        value, stop = _json(text, begin, ended)
    except ValueError as error:
        end = text.find("[TOOL_CALLS]", begin)
        if end < 0 and not ended:
            raise Incomplete from None
        return [_no_json(error)], end if end >= 0 else len(text)
    if name:
        return [_named(name, value)], stop
    return [_call_of(each) for each in value] or [MalformedCall("the list of calls is empty")], stop


# -- Llama 3, and JSON without a mark ----------------------------------------------------------------------------------


def read_python_tag(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """`<|python_tag|>{"name": .., "parameters": {..}}`, several with `;` between; or `NAME.call(KEY="..")`."""
    body = text[at + len("<|python_tag|>") :].lstrip()
    if not body.startswith("{"):
        if not ended:
            raise Incomplete
        return [_python_call(_ENDS.sub("", body))], len(text)
    values = _json_values(body, ended)
    if isinstance(values, ValueError):
        if not ended:  # all of the answer is of the call that is wrong
            raise Incomplete
        return [_no_json(values)], len(text)
    return [_call_of(value) for value in values], len(text)


def _python_call(code: str) -> Call:
    problem = MalformedCall("behind <|python_tag|> stands neither a call in JSON nor NAME.call(..)")
    try:
        call = ast.parse(code.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "call"):
            return problem
        return _named(
            ast.unparse(call.func.value), {str(key.arg): ast.literal_eval(key.value) for key in call.keywords}
        )
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return problem


def read_bare_json(text: str, ended: bool, properties: Properties) -> Parts | None:
    """An answer that is a call in JSON, several with `;` between, or a list of them; None for any other answer.

    An object that has a name is no call by that: calls have arguments (or parameters) too, and nothing else.
    """
    body = text.lstrip()
    if body[:1] not in ("{", "["):
        if not body and not ended:
            raise Incomplete
        return None
    if body.startswith("[") and not body[1:].lstrip().startswith("{"):
        if not body[1:].strip() and not ended:
            raise Incomplete
        return None
    values = _json_values(body, ended)
    if isinstance(values, ValueError) or not all(map(_is_bare_call, values)) or not values:
        return None
    return [_call_of(value) for value in values]


def _json_values(body: str, ended: bool) -> list[Any] | ValueError:
    """The values of a text that is JSON, `;` between several; those of a list. Waits for the end of the answer."""
    values: list[Any] = []
    place = 0
    while True:
        try:
            value, place = _json(body, place, ended)
        except ValueError as error:
            return error
        values += value if isinstance(value, list) else [value]
        end = _ENDS.match(body, place)
        assert end is not None, "it matches no text too"
        place = end.end()
        if place == len(body):
            if not ended:
                raise Incomplete
            return values
        if body[place] != ";":
            return ValueError("text stands behind its object")
        place = _skip(body, place + 1)


def _is_bare_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and ("arguments" in value) != ("parameters" in value)
        and value.keys() <= _BARE_KEYS
    )


def read_bare_glm4(text: str, ended: bool, properties: Properties) -> Parts | None:
    """`NAME`, and in the next line its arguments in JSON, of GLM-4; NAME is that of a tool."""
    names = tuple(f"{name}\n" for name in properties)
    body = text.lstrip()
    if not ended and any(name.startswith(body) for name in names):
        raise Incomplete
    name = next((name for name in names if body.startswith(name)), None)
    if name is None:
        return None
    arguments = body[len(name) :].strip()
    if not arguments.startswith("{") and (ended or arguments):
        return None
    if not ended:
        raise Incomplete
    try:
        return [_named(name, _DECODER.decode(arguments))]
    except (ValueError, RecursionError) as error:
        return [_no_json(ValueError(str(error)))]


# -- DeepSeek ----------------------------------------------------------------------------------------------------------

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK_MARKS = (_CALLS, _CALL)


def read_deepseek(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """The type, a separator, the name and arguments in a block of JSON (V3, R1); or the name, the separator and the
    arguments (V3.1); each between the marks of a call."""
    place = at + len(_CALLS) if text.startswith(_CALLS, at) else at
    calls: Parts = []
    while (begin := _behind(text, place, _CALL, ended)) is not None:
        separator = _find(text, _SEPARATOR, begin, ended)
        name, body = text[begin:separator], _skip(text, min(len(text), separator + len(_SEPARATOR)))
        if body == len(text) and not ended:
            raise Incomplete
        if not text.startswith("{", body):  # the type stood before
            head = _find(text, "{", body, ended)
            name, body = text[body:head].partition("\n")[0], head
        try:
            value, stop = _json(text, body, ended)
        except ValueError as error:
            calls.append(_no_json(error))
            place = _find(text, _CALL_END, begin, ended) + len(_CALL_END)
            continue
        calls.append(_named(name, value))
        place = _find(text, _CALL_END, stop, ended) + len(_CALL_END)
    if not calls:
        calls.append(MalformedCall(f"a call begins with {_CALL}"))
    end = _behind(text, place, _CALLS_END, ended)
    return calls, min(len(text), place) if end is None else end


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

HARMONY_MARKS = ("<|start|>assistant", "<|channel|>")
HARMONY_MESSAGE = "<|message|>"
HARMONY_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)")
HARMONY_RECIPIENT = re.compile(r"\bto=([\w.:-]+)")
HARMONY_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


def read_harmony(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """A message of the harmony format: one to `functions.NAME` is a call, one of the channel analysis a thought."""
    head = _find(text, HARMONY_MESSAGE, at, ended)
    header, begin = text[at:head], min(len(text), head + len(HARMONY_MESSAGE))
    recipient, channel = HARMONY_RECIPIENT.search(header), HARMONY_CHANNEL.search(header)
    if recipient is None:
        end = HARMONY_END.search(text, begin)
        if end is None and not ended:
            raise Incomplete
        stop = end.start() if end else len(text)
        is_thought = channel is not None and channel[1] == "analysis"
        return [] if is_thought else [text[begin:stop]], end.end() if end else len(text)
    name = recipient[1].removeprefix("functions.")
    try:
        value, stop = _json(text, _skip(text, begin), ended)
    except ValueError as error:
        call: Call = _no_json(error)
        stop = begin
    else:
        call = _named(name, value)
    end = HARMONY_END.search(text, stop)
    if end is None and not ended:
        raise Incomplete
    return [call], end.end() if end else len(text)


def read_bare_harmony(text: str, ended: bool, properties: Properties) -> Parts | None:
    """An answer that goes on with the header of its prompt, ` to=functions.NAME<|channel|>..`; None for any other."""
    body = text.lstrip()
    if not ended and "to=".startswith(body):
        raise Incomplete
    if not body.startswith("to="):
        return None
    if not ended:
        raise Incomplete
    parts, stop = read_harmony(body, 0, ended, properties)
    while stop < len(body):
        if not body.startswith(HARMONY_MARKS, stop):
            return [*parts, body[stop:]]
        more, stop = read_harmony(body, stop, ended, properties)
        parts += more
    return parts
