"""Where in the text of a conversation each message is, and which of it the assistant would have to write.

The obvious way, `scripts`, holds for any template: what the assistant writes in turn i is what the rendering of the
first i + 1 messages has beyond the prompt made of the first i. The whole conversation is rendered once and these spans
are looked up in it.

Some templates rewrite history: Qwen3's leaves out the reasoning of earlier turns, others move the list of tools to the
last question. Then an earlier turn does not stand in the whole conversation the way the assistant has to write it. Such
a turn becomes a sample of its own, rendered up to its end as it would be when it is generated, with what comes before
it as context.

The fast way, `SpanRenderer`, renders each sequence of roles once with stand-ins for the contents and then puts the
real ones in their places. It is used for contents that cannot look different to the template (see
`ChatTemplate.looks_for`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

from danlu.data.chat_template import ChatTemplate, Turn
from danlu.errors import DataError


class Reason(IntEnum):
    """Why a token is there. Whether it is trained is its weight."""

    TEMPLATE = 0
    """Text the chat template adds around messages, role headers for example."""
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    """What the assistant writes, tool calls and their marks included."""
    REASONING = 4
    """The assistant's thoughts and their marks."""
    TOOL = 5
    """The result of a tool call."""
    TERMINATOR = 6
    """Closes an assistant turn; trained, or the model never stops."""
    BOS = 7
    EOS = 8
    TEXT = 9
    """Plain text, or tokens given as such."""
    PROMPT = 10
    COMPLETION = 11

    @property
    def label(self) -> str:
        """What users read."""
        return "end-of-turn" if self is Reason.TERMINATOR else self.name.lower()


_CONTENT = {"system": Reason.SYSTEM, "user": Reason.USER, "tool": Reason.TOOL, "assistant": Reason.ASSISTANT}
_THOUGHT_END = "</think>"
_STAND_IN = re.compile(r"Zq(\d+)content\1qZ")
_CHECK_EVERY = 64


@dataclass(frozen=True, slots=True)
class AnnotatedText:
    """The text of one sample, cut into spans that follow each other without gaps.

    Attributes:
        stops: where each span ends; `size` of them are counted in characters (or bytes, from `SpanRenderer` if asked).
        reasons: of each span.
        turns: of each span, the message it belongs to; -1 for none.
        trained: the assistant turns that stand here as they are to be written.
        closed: whether the template closes the last turn with a token of its own.
    """

    text: str
    stops: tuple[int, ...]
    reasons: tuple[Reason, ...]
    turns: tuple[int, ...]
    trained: frozenset[int]
    closed: bool

    def in_bytes(self) -> AnnotatedText:
        """The same with stops counted in UTF-8 bytes."""
        if self.text.isascii():
            return self
        sizes = [len(self.text[start:stop].encode()) for start, stop in zip((0, *self.stops), self.stops, strict=False)]
        return AnnotatedText(self.text, tuple(accumulate(sizes)), self.reasons, self.turns, self.trained, self.closed)


def scripts(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate, wanted: Collection[int]
) -> list[AnnotatedText]:
    """A conversation as one script, and one more for each wanted turn that the template rewrites later on.

    Args:
        wanted: the assistant turns that are to be trained.

    Raises:
        DataError: the template refuses the conversation or a beginning of it.
    """
    whole = template.render(turns, tools)
    if not whole:
        raise DataError("the chat template renders this conversation as no text at all")
    spans = {
        i: _written(turns, tools, template, i, whole) for i, turn in enumerate(turns) if turn["role"] == "assistant"
    }
    found = {i: span for i, span in spans.items() if span is not None}
    result = [_script(whole, turns, tools, found, template)]
    for i in sorted(i for i in wanted if spans[i] is None):
        early = template.render(turns[: i + 1], tools)
        span = _written(turns[: i + 1], tools, template, i, early)
        if span is None:
            raise DataError(
                f"the chat template renders message {i + 1} so that the prompt before it is not in front of it"
            )
        result.append(_script(early, turns[: i + 1], tools, {i: span}, template))
    return result


def _written(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate, i: int, whole: str
) -> tuple[int, int] | None:
    """Where `whole` holds what the assistant writes in turn i; None if it is not there as it is to be written."""
    prompt = template.render(turns[:i], tools, prompt=True)
    before = template.render(turns[:i], tools)
    after = template.render(turns[: i + 1], tools) if i + 1 < len(turns) else whole
    start = template.common(prompt, whole)
    # A prompt may end in what this turn replaces (an empty thought), but all before that must be there.
    if start < template.common(prompt, before):
        return None
    stop = template.common(after, whole)
    # What a conversation that ends here has beyond one that goes on may only close it (Phi-3 adds an end of text).
    if stop < start or not template.closing.fullmatch(after, stop):
        return None
    return start, stop


def _script(
    text: str,
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]] | None,
    written: Mapping[int, tuple[int, int]],
    template: ChatTemplate,
) -> AnnotatedText:
    found = _places(text, turns, tools, template) | dict(written)
    for i in sorted(set(range(len(turns))) - found.keys()):
        # Between its neighbours: a short content could also be found in another message.
        start = next((found[j][1] for j in range(i - 1, -1, -1) if j in found), 0)
        stop = next((found[j][0] for j in range(i + 1, len(turns)) if j in found), len(text))
        place = _find(text, turns[i], start, stop)
        if place and all(place[1] <= begin or end <= place[0] for begin, end in found.values()):
            found[i] = place
    spans: list[tuple[int, Reason, int]] = []  # stop, reason, turn
    closed = False
    # In the order of the text: some templates put the system message into the last question.
    for i, (start, stop) in sorted(found.items(), key=lambda entry: entry[1]):
        spans.append((start, Reason.TEMPLATE, i))
        if i in written:
            inner, closed = _inner(text, start, stop, turns[i], i, template)
            spans += inner
        else:
            spans.append((stop, _CONTENT[turns[i]["role"]], i))
    spans.append((len(text), Reason.TEMPLATE, len(turns) - 1))
    filled = [
        span for before, span in zip((0, *(stop for stop, _, _ in spans)), spans, strict=False) if span[0] > before
    ]
    stops, reasons, owners = zip(*filled, strict=True) if filled else ((), (), ())
    return AnnotatedText(text, stops, reasons, owners, frozenset(written), closed)


def _places(
    text: str, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate
) -> dict[int, tuple[int, int]]:
    """Where the contents of messages that are not the assistant's stand, found by rendering stand-ins for them.

    Looking for the content alone could find a short one in the template's own text. Empty if the stand-ins change what
    the template renders around them.
    """
    numbers = [i for i, turn in enumerate(turns) if turn["role"] != "assistant" and turn["content"].strip()]
    others = [{**turn, "content": _stand_in(i)} if i in numbers else turn for i, turn in enumerate(turns)]
    try:
        first, *rest = _STAND_IN.split(template.render(others, tools))
    except DataError:
        return {}
    order, literals = [int(number) for number in rest[::2]], rest[1::2]
    if sorted(order) != numbers or not text.startswith(first):
        return {}
    places, position = {}, len(first)
    for i, literal in zip(order, literals, strict=True):
        content = turns[i]["content"]
        # Many templates trim.
        kept = next((one for one in (content, content.strip()) if text.startswith(one + literal, position)), None)
        if kept is None:
            return {}
        places[i] = position, position + len(kept)
        position += len(kept) + len(literal)
    return places if position == len(text) else {}


def _find(text: str, turn: Turn, start: int, stop: int) -> tuple[int, int] | None:
    """Where a content stands between two places, an earlier answer also without its thought; None if nowhere."""
    content = turn["content"].strip()
    for option in (content, content.rpartition(_THOUGHT_END)[2].strip()):
        if option and (place := text.find(option, start, stop)) >= 0:
            return place, place + len(option)
    return None


def _stand_in(number: int) -> str:
    return f"Zq{number}content{number}qZ"


def _inner(
    text: str, start: int, stop: int, turn: Turn, i: int, template: ChatTemplate
) -> tuple[list[tuple[int, Reason, int]], bool]:
    """What the assistant writes, cut into thought, answer, terminator and the white space that follows; and whether the
    template closes it with a token."""
    end, last, closed = _closing(text, start, stop, template)
    thought = text.rfind(_THOUGHT_END, start, end)
    thought = thought + len(_THOUGHT_END) if thought >= 0 else start
    reasoning = (turn.get("reasoning_content") or "").strip()
    if thought == start and reasoning and (place := text.find(reasoning, start, end)) >= 0:
        thought = place + len(reasoning)
    spans = [
        (thought, Reason.REASONING, i),
        (end, Reason.ASSISTANT, i),
        (last, Reason.TERMINATOR, i),
        (stop, Reason.TEMPLATE, i),
    ]
    return spans, closed


def _closing(text: str, start: int, stop: int, template: ChatTemplate) -> tuple[int, int, bool]:
    """Where the terminators at the end of a turn begin and end, and whether there are any.

    With several (Phi-3 ends a conversation with `<|end|>` and `<|endoftext|>`) they count as one, with the white space
    between them. Without any, the white space that ends the turn takes their place.
    """
    first, last, position = -1, -1, stop
    while True:
        position = start + len(text[start:position].rstrip())
        token = next((token for token in template.terminators if text.endswith(token, start, position)), None)
        if token is None:
            return (first, last, True) if first >= 0 else (position, stop, False)
        last = position if last < 0 else last
        first = position = position - len(token)


class SpanRenderer:
    """Scripts by putting contents between the literal texts of a template, found once for each sequence of roles.

    Args:
        template: the chat template.
        offsets_in_bytes: count stops in UTF-8 bytes instead of characters.
    """

    def __init__(self, template: ChatTemplate, offsets_in_bytes: bool) -> None:
        self._template = template
        self._by_bytes = offsets_in_bytes
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...]], _Known | None] = {}
        equal, searched = template.looks_for
        self._equal = equal
        self._searched = tuple({*searched, *template.terminators, _THOUGHT_END})
        self._used = 0

    def scripts(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, wanted: tuple[int, ...]
    ) -> list[AnnotatedText]:
        """What `spans.scripts` gives, faster where that is safe."""
        if tools is None and self._template.is_transparent and all(map(self._is_plain, turns)):
            key = (tuple([turn["role"] for turn in turns]), wanted)
            if is_new := key not in self._known:
                self._known[key] = self._shapes(*key)
            known = self._known[key]
            contents = [turn["content"] for turn in turns]
            if known is not None and known.rivals.isdisjoint([content[0] for content in contents]):
                result = [shape.fill(contents, self._by_bytes) for shape in known.shapes]
                if is_new or self._used % _CHECK_EVERY == 0:
                    rendered = self._template.render(turns)
                    assert result[0].text == rendered, "a shape does not give what the template renders"
                self._used += 1
                return result
        slow = scripts(turns, tools, self._template, wanted)
        return [one.in_bytes() for one in slow] if self._by_bytes else slow

    def _is_plain(self, turn: Turn) -> bool:
        """Whether the template can see no difference between this message and one with another plain content."""
        content: str = turn["content"]
        if len(turn) != 2 or not content or content[0].isspace() or content[-1].isspace() or content in self._equal:
            return False
        # A plain loop: a generator costs more than the searches.
        for constant in self._searched:  # noqa: SIM110
            if constant in content:
                return False
        return True

    def _shapes(self, roles: tuple[str, ...], wanted: tuple[int, ...]) -> _Known | None:
        """The shapes of a sequence of roles; None where a content stands in no place, or not once, or is changed."""
        contents = [_stand_in(number) for number in range(len(roles))]
        turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            made = scripts(turns, None, self._template, wanted)
            rivals = self._rivals(turns)
        except DataError:
            return None  # the slow way says what is wrong, for the real row
        shapes = [_Shape.of(script, contents) for script in made]
        return _Known(tuple(shape for shape in shapes if shape is not None), rivals) if None not in shapes else None

    def _rivals(self, turns: Sequence[Turn]) -> frozenset[str]:
        """The first characters of what prompts and beginnings of a conversation have where the whole goes on otherwise.

        A prompt can end in `<think>`, for example: an answer that begins so has more in common with it than a stand-in.
        """
        whole = self._template.render(turns)
        others = [
            self._template.render(turns[:i], prompt=True) for i, turn in enumerate(turns) if turn["role"] == "assistant"
        ]
        others += [self._template.render(turns[: i + 1]) for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        return frozenset(
            other[place] for other in others if (place := self._template.common(other, whole)) < len(other)
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a sequence of roles: its shapes, and how no content may begin for them to hold."""

    shapes: tuple[_Shape, ...]
    rivals: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A script without its contents: content k stands between literals k and k + 1."""

    literals: tuple[str, ...]
    sizes: tuple[int, ...]  # UTF-8 bytes of each literal
    borders: tuple[tuple[int, int, int], ...]  # of each span: literal, characters of it, bytes of it
    like: AnnotatedText

    @classmethod
    def of(cls, script: AnnotatedText, contents: Sequence[str]) -> _Shape | None:
        literals, starts, position = [], [], 0
        used = [content for content in contents if content in script.text]
        if used != list(contents[: len(used)]):
            return None
        for content in used:
            if script.text.count(content) != 1 or (place := script.text.find(content, position)) < 0:
                return None
            literals.append(script.text[position:place])
            starts.append(position)
            position = place + len(content)
        literals.append(script.text[position:])
        starts.append(position)
        borders = []
        for stop in script.stops:
            number = next((n for n, at in enumerate(starts) if at <= stop <= at + len(literals[n])), None)
            if number is None:
                return None
            characters = stop - starts[number]
            borders.append((number, characters, len(literals[number][:characters].encode())))
        return cls(tuple(literals), tuple(len(one.encode()) for one in literals), tuple(borders), script)

    def fill(self, contents: Sequence[str], offsets_in_bytes: bool) -> AnnotatedText:
        parts, starts, position = [self.literals[0]], [0], 0
        for number in range(len(self.literals) - 1):
            content = contents[number]
            parts += (content, self.literals[number + 1])
            if offsets_in_bytes:
                position += self.sizes[number] + (len(content) if content.isascii() else len(content.encode()))
            else:
                position += len(self.literals[number]) + len(content)
            starts.append(position)
        stops = tuple([starts[number] + (size if offsets_in_bytes else width) for number, width, size in self.borders])
        like = self.like
        return AnnotatedText("".join(parts), stops, like.reasons, like.turns, like.trained, like.closed)
