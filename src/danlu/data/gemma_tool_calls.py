"""The form in which Gemma 4 writes calls of tools: `<|tool_call>call:NAME{KEY:VALUE,..}<tool_call|>`.

Texts stand between marks of their own, keys stand bare, and the rest is as in JSON.
"""

from __future__ import annotations

import re
from typing import Any

from danlu.core.types import MalformedCall, ToolCall
from danlu.data.tool_call_forms import Incomplete, Parts, Properties

OPEN, CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"\s*call:\s*([^\s{]+)\s*")
_BARE = re.compile(r"[^,{}\[\]<]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_LITERALS = {"true": True, "false": False, "null": None, "None": None}  # the template writes null as Python does
_DEEPEST = 100


def read_gemma4(text: str, at: int, ended: bool, properties: Properties) -> tuple[Parts, int]:
    """Reads one call behind its mark."""
    begin = at + len(OPEN)
    brace, closed = text.find("{", begin), text.find(CLOSE, begin)
    if brace < 0 and closed < 0 and not ended:
        raise Incomplete
    name = None if brace < 0 else _NAME.fullmatch(text, begin, brace)
    if name is None:
        return [MalformedCall("a call is call:NAME{KEY:VALUE}")], _behind_call(text, begin, ended)
    try:
        arguments, stop = _read_object(_Text(text, ended), brace, depth=0)
    except ValueError as error:
        return [MalformedCall(f"the call of {name[1]} is no {{KEY:VALUE}}: {error}")], _behind_call(text, brace, ended)
    behind = text[stop:].lstrip()
    if not ended and CLOSE.startswith(behind) and behind != CLOSE:
        raise Incomplete
    if behind and not behind.startswith(CLOSE):
        return [MalformedCall(f"a call ends in {CLOSE}")], _behind_call(text, stop, ended)
    return [ToolCall(name[1], arguments)], len(text) - len(behind.removeprefix(CLOSE))


def _behind_call(text: str, at: int, ended: bool) -> int:
    """The place behind the mark that ends a call, or the end of the answer."""
    place = text.find(CLOSE, at)
    if place < 0 and not ended:
        raise Incomplete
    return place + len(CLOSE) if place >= 0 else len(text)


class _Text:
    """An answer, of which more may come."""

    def __init__(self, text: str, ended: bool) -> None:
        self.text, self.ended = text, ended

    def next(self, at: int) -> tuple[str, int]:
        """The next character that is no white space, and its place. Raises where the answer ends before."""
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        if at == len(self.text):
            raise self.end()
        return self.text[at], at

    def end(self) -> Exception:
        """The error for an answer that goes no further."""
        return ValueError("it has no end") if self.ended else Incomplete()

    def quoted(self, at: int) -> tuple[str, int] | None:
        """A text between its marks and the place behind; None where none begins."""
        if not self.text.startswith(_QUOTE, at):
            if not self.ended and _QUOTE.startswith(self.text[at:]):
                raise Incomplete
            return None
        end = self.text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise self.end()
        return self.text[at + len(_QUOTE) : end], end + len(_QUOTE)


def _read_value(text: _Text, at: int, depth: int) -> tuple[Any, int]:
    first, at = text.next(at)
    if depth > _DEEPEST:
        raise ValueError("brackets are nested too deeply")
    if first == "{":
        return _read_object(text, at, depth)
    if first == "[":
        return _read_list(text, at, depth)
    if (quoted := text.quoted(at)) is not None:
        return quoted
    bare = _BARE.match(text.text, at)
    assert bare is not None, "the pattern takes nothing, too"
    if bare.end() == len(text.text):
        raise text.end()
    written = bare[0].strip()
    if written in _LITERALS:
        return _LITERALS[written], bare.end()
    number = _NUMBER.fullmatch(written)
    if number is None:
        raise ValueError(f"{written!r} is no value")
    return (float(written) if number[2] or number[3] else int(written)), bare.end()


def _read_object(text: _Text, at: int, depth: int) -> tuple[dict[str, Any], int]:
    """The values by key of an object that begins at a place, and the place behind it."""
    values: dict[str, Any] = {}
    first, place = text.next(at + 1)
    if first == "}":
        return values, place + 1
    while True:
        key, place = _read_key(text, place)
        values[key], place = _read_value(text, place, depth + 1)
        sign, place = text.next(place)
        if sign == "}":
            return values, place + 1
        if sign != ",":
            raise ValueError(f"{sign!r} stands behind a value")
        _, place = text.next(place + 1)


def _read_key(text: _Text, at: int) -> tuple[str, int]:
    """A key, and the place behind its colon."""
    if (quoted := text.quoted(at)) is not None:
        sign, place = text.next(quoted[1])
        if sign != ":":
            raise ValueError(f"{sign!r} stands behind a key")
        return quoted[0], place + 1
    colon = text.text.find(":", at)
    written = text.text[at : colon if colon >= 0 else len(text.text)]
    if any(sign in written for sign in "{}[],<"):
        raise ValueError(f"{written[:20]!r} is no key")
    if colon < 0:
        raise text.end()
    return written.strip(), colon + 1


def _read_list(text: _Text, at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    first, place = text.next(at + 1)
    if first == "]":
        return values, place + 1
    while True:
        value, place = _read_value(text, place, depth + 1)
        values.append(value)
        sign, place = text.next(place)
        if sign == "]":
            return values, place + 1
        if sign != ",":
            raise ValueError(f"{sign!r} stands behind a value")
        place += 1
