"""Texts of messages that a chat template leaves out of its rendering.

A template that shows no thoughts, cuts a content at `</think>` or takes contents as lists of parts only loses parts of
the row, and nothing else would show it. So the texts of each message (its content, its thought, the strings of its
calls) are looked for in the rendered text. Some templates show texts only while their message is the last (the thoughts
of earlier turns): the model sees the same when it answers later turns, so this is no error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from danlu.core.errors import DataError
from danlu.data.chat_template import ChatTemplate, Turn
from danlu.data.column_values import abbreviate

_THOUGHT_MARK = re.compile(r"(</?think>)")  # templates write these themselves, and the white space around them
_SPACES = re.compile(r"\s+")
_CERTAIN_LENGTH = 20  # characters of a text that no template has among its own words
_ADVICE = {
    "content": "Name a template that shows it in model.chat_template, or take it out of the row",
    "reasoning_content": (
        "Name a template that shows thoughts in model.chat_template, write the thought into the content as the model "
        "is to write it, or take it out of the row"
    ),
    "tool_calls": "Name a template that shows it in model.chat_template, or take it out of the row",
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A text of message `turn`, from its key `key`, that a rendering does not show."""

    turn: int
    key: str
    text: str


def texts_left_out(
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]] | None,
    template: ChatTemplate,
    text: str,
    prompt: bool = False,
) -> tuple[LeftOut, ...]:
    """Finds the texts that `text`, the rendering of these turns, lacks and the template shows in a last turn.

    Args:
        prompt: the text ends with the generation prompt.

    Raises:
        DataError: the template leaves out a text of a message wherever the message stands.
    """
    left_out = _Rendering(turns, tools, template, text, prompt).left_out(range(len(turns)))
    for part in left_out:
        beginning = turns[: part.turn + 1]
        try:
            alone = template.render(beginning, tools)
        except DataError:
            shown_alone = False
        else:
            shown_alone = part not in _Rendering(beginning, tools, template, alone, False).left_out([part.turn])
        if not shown_alone:
            raise DataError(
                f"message {part.turn + 1}: the chat template leaves out text of its {part.key}, "
                f"{abbreviate(part.text)}, which would be lost. {_ADVICE[part.key]}"
            )
    return tuple(left_out)


@dataclass(frozen=True)
class _Rendering:
    """A rendered text, with the conversation and template that it was rendered from."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] | None
    template: ChatTemplate
    text: str
    prompt: bool

    def left_out(self, numbers: Sequence[int]) -> list[LeftOut]:
        """The texts of these turns that it does not show."""
        return [
            LeftOut(number, key, passage)
            for number in numbers
            for key, place, passage in _texts(self.turns[number])
            if not self._shows(passage, key, _placeholder(number, key, place))
        ]

    def _shows(self, passage: str, key: str, placeholder: str) -> bool:
        if not self._contains(passage):
            return False
        if key == "tool_calls" or (
            len(passage) >= _CERTAIN_LENGTH and self.text.count(passage) >= self._all_texts.count(passage)
        ):
            return True
        # It may be a word of the template's, or of another text: a placeholder within it cannot be.
        return self._marked is None or placeholder in self._marked

    def _contains(self, passage: str) -> bool:
        """Whether a text stands in it: as it is, as JSON or Python write it within a string, or spaced otherwise."""
        if passage in self.text:
            return True
        escaped = [json.dumps(passage, ensure_ascii=False)[1:-1], json.dumps(passage)[1:-1], repr(passage)[1:-1]]
        escaped.append(json.dumps(escaped[0], ensure_ascii=False)[1:-1])  # JSON within a string of JSON
        return any(_SPACES.sub("", form) in self._without_spaces for form in (passage, *escaped))

    @cached_property
    def _without_spaces(self) -> str:
        return _SPACES.sub("", self.text)

    @cached_property
    def _all_texts(self) -> str:
        return "\n".join(passage for turn in self.turns for *_, passage in _texts(turn))

    @cached_property
    def _marked(self) -> str | None:
        """The rendering with a placeholder in each content and thought; None where the template refuses them."""
        try:
            return self.template.render(
                [_with_placeholders(turn, number) for number, turn in enumerate(self.turns)], self.tools, self.prompt
            )
        except DataError:
            return None


def _texts(turn: Turn) -> Iterator[tuple[str, int, str]]:
    """The texts of a message with the key and the place there that each is from; those around marks of thoughts are
    texts of their own."""
    for key in ("content", "reasoning_content"):
        for place, passage in enumerate(_THOUGHT_MARK.split(turn.get(key) or "")[::2]):
            if stripped := passage.strip():
                yield key, place, stripped
    for call in turn.get("tool_calls") or ():
        function = call["function"]
        for passage in _strings([function["name"], function["arguments"]]):
            if stripped := passage.strip():
                yield "tool_calls", 0, stripped


def _strings(value: Any) -> Iterator[str]:
    """The strings in a value, the keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _with_placeholders(turn: Turn, number: int) -> Turn:
    """The message with a placeholder within each text: templates look at how a content begins and ends."""
    marked = dict(turn)
    for key in ("content", "reasoning_content"):
        parts = _THOUGHT_MARK.split(turn.get(key) or "")
        for place, passage in enumerate(parts[::2]):
            if stripped := passage.strip():
                middle = passage.index(stripped) + len(stripped) // 2
                parts[2 * place] = passage[:middle] + _placeholder(number, key, place) + passage[middle:]
        if any(parts):
            marked[key] = "".join(parts)
    if "thinking" in turn:
        marked["thinking"] = marked.get("reasoning_content", turn["thinking"])
    return marked


def _placeholder(number: int, key: str, place: int) -> str:
    return f"Zq{number}{key.partition('_')[0]}{place}qZ"
