"""The place of each message in the text of a conversation, and the parts that the assistant would have to write.

The obvious way, `annotate`, holds for any template: the text that the assistant writes in turn i is the rendering of
the first i + 1 messages without the prompt made of the first i. The whole conversation is rendered once and these spans
are looked up in it.

Some templates rewrite history: Qwen3's leaves out the reasoning of earlier turns, others move the list of tools to the
last question. Then an earlier turn does not stand in the whole conversation the way the assistant has to write it. Such
a turn becomes a sample of its own, rendered up to its end as it would be when it is generated, with the text before it
as context.

The fast way, `SpanRenderer`, renders each sequence of roles once with placeholders for the contents and then puts the
real ones in their places. It is used for contents that cannot look different to the template (see
`ChatTemplate.looks_for`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

from danlu.core.errors import DataError
from danlu.data.chat_template import ChatTemplate, Turn
from danlu.data.shown_texts import LeftOut, texts_left_out
from danlu.data.thoughts import THOUGHTS, opened_thought


class Reason(IntEnum):
    """Why a token is there. Whether it is trained is its weight."""

    TEMPLATE = 0
    """Text the chat template adds around messages, role headers for example."""
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    """The text that the assistant writes, tool calls and their marks included."""
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
        """The name shown to users."""
        return "end-of-turn" if self is Reason.TERMINATOR else self.name.lower()


_CONTENT = {"system": Reason.SYSTEM, "user": Reason.USER, "tool": Reason.TOOL, "assistant": Reason.ASSISTANT}
_REASONING_END = "</think>"
_PLACEHOLDER = re.compile(r"Zq(\d+)content\1qZ")
_RENDERINGS_PER_CHECK = 64


@dataclass(frozen=True, slots=True)
class AnnotatedText:
    """The text of one sample, cut into spans that follow each other without gaps.

    Attributes:
        stops: [spans] where each span ends, in characters (or UTF-8 bytes, from `SpanRenderer` if asked).
        reasons: the reason of each span. turns: the message that each span belongs to; -1 for none.
        trained: the assistant turns that stand here as they are to be written.
        closed: whether the template closes the last turn with a token of its own.
        left_out: parts of a message that the template shows only while it is the last, and not here.
        unlike_prompt: trained turns that do not begin with the whole generation prompt that they are drawn from.
    """

    text: str
    stops: tuple[int, ...]
    reasons: tuple[Reason, ...]
    turns: tuple[int, ...]
    trained: frozenset[int]
    closed: bool
    left_out: tuple[LeftOut, ...] = ()
    unlike_prompt: frozenset[int] = frozenset()

    def in_bytes(self) -> AnnotatedText:
        """The same with stops counted in UTF-8 bytes."""
        if self.text.isascii():
            return self
        sizes = [len(self.text[start:stop].encode()) for start, stop in zip((0, *self.stops), self.stops, strict=False)]
        return replace(self, stops=tuple(accumulate(sizes)))


def annotate(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate, wanted: Collection[int]
) -> list[AnnotatedText]:
    """A conversation as one annotated text, and one more for each wanted turn that the template rewrites later on.

    Args:
        wanted: the assistant turns that are to be trained.

    Raises:
        DataError: the template refuses the conversation or a beginning of it.
    """
    whole = template.render(turns, tools)
    if not whole:
        raise DataError("the chat template renders this conversation as no text at all")
    spans = {
        i: _assistant_span(turns, tools, template, i, whole)
        for i, turn in enumerate(turns)
        if turn["role"] == "assistant"
    }
    unchanged = {i: span for i, span in spans.items() if span is not None}
    result = [_annotate(whole, turns, tools, unchanged, template)]
    for i in sorted(i for i in wanted if spans[i] is None):
        early = template.render(turns[: i + 1], tools)
        span = _assistant_span(turns[: i + 1], tools, template, i, early)
        if span is None:
            raise DataError(
                f"the chat template renders message {i + 1} so that the prompt before it is not in front of it"
            )
        result.append(_annotate(early, turns[: i + 1], tools, {i: span}, template))
    return result


class _Written(NamedTuple):
    """The place of the assistant's part of a turn in a text, in characters, and whether its whole prompt is
    before it.
    """

    start: int
    stop: int
    follows_prompt: bool


def _assistant_span(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate, i: int, whole: str
) -> _Written | None:
    """Returns the place in `whole` of the text that the assistant writes in turn i.

    None if it is not there as the assistant has to write it: the template rewrites history.
    """
    prompt = template.render(turns[:i], tools, prompt=True)
    earlier = template.render(turns[:i], tools)
    after = template.render(turns[: i + 1], tools) if i + 1 < len(turns) else whole
    start = template.common_prefix_length(prompt, whole)
    # A prompt may end in what this turn replaces (an empty thought), but all before that must be there.
    if start < template.common_prefix_length(prompt, earlier):
        return None
    stop = template.common_prefix_length(after, whole)
    # What a conversation that ends here has beyond one that goes on may only close it (Phi-3 adds an end of text).
    if stop < start or not template.closing.fullmatch(after, stop):
        return None
    return _Written(start, stop, start == len(prompt))


def _annotate(
    text: str,
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]] | None,
    written: Mapping[int, _Written],
    template: ChatTemplate,
) -> AnnotatedText:
    """Adds the span of every message to `text`. `written`: the assistant's part of each turn."""
    turn_spans = _content_spans(text, turns, tools, template) | {i: span[:2] for i, span in written.items()}
    for i in sorted(set(range(len(turns))) - turn_spans.keys()):
        # Searched between its neighbours only: a short content could also be found in another message.
        start = next((turn_spans[j][1] for j in range(i - 1, -1, -1) if j in turn_spans), 0)
        stop = next((turn_spans[j][0] for j in range(i + 1, len(turns)) if j in turn_spans), len(text))
        span = _find_content(text, turns[i], start, stop)
        if span and all(span[1] <= begin or end <= span[0] for begin, end in turn_spans.values()):
            turn_spans[i] = span
    spans: list[tuple[int, Reason, int]] = []  # stop, reason, turn
    closed = False
    # In the order of the text: some templates put the system message into the last question.
    for i, (start, stop) in sorted(turn_spans.items(), key=lambda entry: entry[1]):
        spans.append((start, Reason.TEMPLATE, i))
        if i in written:
            assistant_spans, closed = _split_assistant_span(text, start, stop, turns[i], i, template)
            spans += assistant_spans
        else:
            spans.append((stop, _CONTENT[turns[i]["role"]], i))
    spans.append((len(text), Reason.TEMPLATE, len(turns) - 1))
    starts = (0, *(stop for stop, _, _ in spans))
    nonempty = [span for start, span in zip(starts, spans, strict=False) if span[0] > start]
    stops, reasons, owners = zip(*nonempty, strict=True) if nonempty else ((), (), ())
    unlike_prompt = frozenset(i for i, span in written.items() if not span.follows_prompt)
    return AnnotatedText(text, stops, reasons, owners, frozenset(written), closed, unlike_prompt=unlike_prompt)


def _content_spans(
    text: str, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate
) -> dict[int, tuple[int, int]]:
    """Returns (start, stop) of the contents of messages that are not the assistant's, by turn, found by rendering
    placeholders.

    Looking for the content alone could find a short one in the template's own text. Empty if the placeholders change
    the text that the template renders around them.
    """
    numbers = [i for i, turn in enumerate(turns) if turn["role"] != "assistant" and turn["content"].strip()]
    replaced = [{**turn, "content": _placeholder(i)} if i in numbers else turn for i, turn in enumerate(turns)]
    try:
        first, *rest = _PLACEHOLDER.split(template.render(replaced, tools))
    except DataError:
        return {}
    order, literals = [int(number) for number in rest[::2]], rest[1::2]
    if sorted(order) != numbers or not text.startswith(first):
        return {}
    spans, position = {}, len(first)
    for i, literal in zip(order, literals, strict=True):
        content = turns[i]["content"]
        # Many templates trim.
        kept = next((c for c in (content, content.strip()) if text.startswith(c + literal, position)), None)
        if kept is None:
            return {}
        spans[i] = position, position + len(kept)
        position += len(kept) + len(literal)
    return spans if position == len(text) else {}


def _find_content(text: str, turn: Turn, start: int, stop: int) -> tuple[int, int] | None:
    """(start, stop) of a content within `text[start:stop]`; an answer is also looked for without its reasoning."""
    content = turn["content"].strip()
    for option in (content, content.rpartition(_REASONING_END)[2].strip()):
        if option and (place := text.find(option, start, stop)) >= 0:
            return place, place + len(option)
    return None


def _placeholder(number: int) -> str:
    return f"Zq{number}content{number}qZ"


def _split_assistant_span(
    text: str, start: int, stop: int, turn: Turn, i: int, template: ChatTemplate
) -> tuple[list[tuple[int, Reason, int]], bool]:
    """Splits the assistant's text into spans (stop, reason, turn): reasoning, answer, terminator, then white space.

    The second value says whether the template closes the turn with a token.
    """
    terminators = template.call_terminators if turn.get("tool_calls") else template.terminators
    end, last, closed = _terminator_span(text, start, stop, terminators)
    reasoning_stop = _thought_stop(text, start, end)
    reasoning = (turn.get("reasoning_content") or "").strip()
    if reasoning_stop == start and reasoning and (place := text.find(reasoning, start, end)) >= 0:
        reasoning_stop = place + len(reasoning)
    spans = [
        (reasoning_stop, Reason.REASONING, i),
        (end, Reason.ASSISTANT, i),
        (last, Reason.TERMINATOR, i),
        (stop, Reason.TEMPLATE, i),
    ]
    return spans, closed


def _thought_stop(text: str, start: int, end: int) -> int:
    """The position behind the mark that ends the thought of a turn; `start` where there is none."""
    if (mark := text.rfind(_REASONING_END, start, end)) >= 0:
        return mark + len(_REASONING_END)
    for opening, closing in THOUGHTS.items():
        is_opened = text.startswith(opening, start) or opened_thought(text[:start]) == opening
        if is_opened and (mark := text.find(closing, start, end)) >= 0:
            return mark + len(closing)
    return start


def _terminator_span(text: str, start: int, stop: int, terminators: Sequence[str]) -> tuple[int, int, bool]:
    """(start, stop) of the terminators at the end of a turn, and whether there are any.

    With several (Phi-3 ends a conversation with `<|end|>` and `<|endoftext|>`) they count as one, with the white space
    between them. Without any, the white space that ends the turn takes their place.
    """
    first, last, position = -1, -1, stop
    while True:
        position = start + len(text[start:position].rstrip())
        token = next((token for token in terminators if text.endswith(token, start, position)), None)
        if token is None:
            return (first, last, True) if first >= 0 else (position, stop, False)
        last = position if last < 0 else last
        first = position = position - len(token)


class SpanRenderer:
    """Annotates conversations by putting contents between the template's literal texts.

    The literals are found once for each sequence of roles, by rendering placeholders; `annotate` of this module is the
    slow way, which holds for any conversation.

    Args:
        template: the chat template.
        offsets_in_bytes: count stops in UTF-8 bytes instead of characters.
    """

    def __init__(self, template: ChatTemplate, offsets_in_bytes: bool) -> None:
        self._template = template
        self._offsets_in_bytes = offsets_in_bytes
        self._by_roles: dict[tuple[tuple[str, ...], tuple[int, ...]], _RoleSequence | None] = {}
        equal, searched = template.looks_for
        self._equal = equal
        self._searched = tuple({*searched, *template.terminators, *THOUGHTS.values()})
        self._renderings = 0

    def annotate(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, wanted: tuple[int, ...]
    ) -> list[AnnotatedText]:
        """Returns the texts of `message_spans.annotate`, faster where that is safe; the first has the texts left out.

        Raises:
            DataError: the template refuses the conversation, or leaves out a text of a message wherever that stands.
        """
        if tools is None and self._template.is_transparent and all(map(self._is_plain, turns)):
            key = (tuple([turn["role"] for turn in turns]), wanted)
            if is_new := key not in self._by_roles:
                self._by_roles[key] = self._span_templates(*key)
            known = self._by_roles[key]
            contents = [turn["content"] for turn in turns]
            if known is not None and known.ambiguous_starts.isdisjoint([content[0] for content in contents]):
                result = [template.fill(contents, self._offsets_in_bytes) for template in known.templates]
                if is_new or self._renderings % _RENDERINGS_PER_CHECK == 0:
                    rendered = self._template.render(turns)
                    assert result[0].text == rendered, "filled-in spans do not give what the template renders"
                self._renderings += 1
                return result
        texts = annotate(turns, tools, self._template, wanted)
        texts[0] = replace(texts[0], left_out=texts_left_out(turns, tools, self._template, texts[0].text))
        return [text.in_bytes() for text in texts] if self._offsets_in_bytes else texts

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

    def _span_templates(self, roles: tuple[str, ...], wanted: tuple[int, ...]) -> _RoleSequence | None:
        """The span templates of a sequence of roles; None where a content is missing, stands twice, or is changed."""
        contents = [_placeholder(number) for number in range(len(roles))]
        turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            texts = annotate(turns, None, self._template, wanted)
            ambiguous_starts = self._ambiguous_starts(turns)
        except DataError:
            return None  # the slow way says what is wrong, for the real row
        # A text of its own ends with the turn that it is for.
        shown = [len(turns), *(max(text.trained) + 1 for text in texts[1:])]
        templates = [_SpanTemplate.of(text, contents[:count]) for text, count in zip(texts, shown, strict=True)]
        complete = tuple(template for template in templates if template is not None)
        return _RoleSequence(complete, ambiguous_starts) if len(complete) == len(templates) else None

    def _ambiguous_starts(self, turns: Sequence[Turn]) -> frozenset[str]:
        """Returns the characters at which prompts and beginnings of a conversation first differ from the whole.

        A prompt can end in `<think>`, for example: an answer that begins so shares more with it than a placeholder.
        """
        whole = self._template.render(turns)
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        beginnings = [self._template.render(turns[:i], prompt=True) for i in answers]
        beginnings += [self._template.render(turns[: i + 1]) for i in answers]
        return frozenset(
            text[n] for text in beginnings if (n := self._template.common_prefix_length(text, whole)) < len(text)
        )


@dataclass(frozen=True, slots=True)
class _RoleSequence:
    """The span templates of a sequence of roles, and the characters no content may begin with for them to hold."""

    templates: tuple[_SpanTemplate, ...]
    ambiguous_starts: frozenset[str]


@dataclass(frozen=True, slots=True)
class _SpanTemplate:
    """An annotated text without its contents: content k stands between literals k and k + 1."""

    literals: tuple[str, ...]
    sizes: tuple[int, ...]  # UTF-8 bytes of each literal
    borders: tuple[tuple[int, int, int], ...]  # of each span: literal, characters of it, bytes of it
    annotated: AnnotatedText  # of the placeholders

    @classmethod
    def of(cls, annotated: AnnotatedText, contents: Sequence[str]) -> _SpanTemplate | None:
        literals, starts, position = [], [], 0
        for content in contents:
            if annotated.text.count(content) != 1 or (place := annotated.text.find(content, position)) < 0:
                return None
            literals.append(annotated.text[position:place])
            starts.append(position)
            position = place + len(content)
        literals.append(annotated.text[position:])
        starts.append(position)
        borders = []
        for stop in annotated.stops:
            number = next((n for n, at in enumerate(starts) if at <= stop <= at + len(literals[n])), None)
            if number is None:
                return None
            characters = stop - starts[number]
            borders.append((number, characters, len(literals[number][:characters].encode())))
        return cls(tuple(literals), tuple(len(text.encode()) for text in literals), tuple(borders), annotated)

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
        return replace(self.annotated, text="".join(parts), stops=stops)
