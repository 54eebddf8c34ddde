"""Rows as tokens, where every token carries its loss weight and the reason for being there.

A text is tokenised once, as a whole: the tokens are those of `apply_chat_template(tokenize=True)`, and spans found in
the text are looked up among them. A token that stands across the border of two spans counts to the trained one: left
out, the first or last letters of an answer would never be learnt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from danlu.core.errors import DataError
from danlu.core.types import Branch
from danlu.data.chat_template import ChatTemplate, render_begun
from danlu.data.message_spans import AnnotatedText, Reason, SpanRenderer
from danlu.data.messages import Conversation, Message, turn_of
from danlu.data.rows import Completion, Row, Text, Tokenized
from danlu.data.tokenizer import Encoded, Tokenizer

_ANSWER_BEGINS = (Reason.ASSISTANT, Reason.REASONING, Reason.COMPLETION)
_PROMPT_ENDS = (Reason.TEMPLATE, Reason.PROMPT)
_ASSISTANT_REASONS = (Reason.ASSISTANT, Reason.REASONING, Reason.TERMINATOR)  # the parts of an assistant turn


@dataclass(frozen=True)
class RenderSettings:
    """How rows become tokens: the fields of the same names in the data section of a recipe."""

    train_on: Literal["all", "assistant", "last"] = "assistant"
    system: str | None = None
    append_eos: bool = True


@dataclass(frozen=True, slots=True)
class Remarks:
    """Warnings for the user about a sample that can be trained.

    Attributes:
        left_out: keys of messages with text that the chat template shows only while the message is the last.
        split_token: the first token that begins in the prompt of a trained answer and ends in the answer; -1: none.
        unlike_prompt: a trained answer does not stand behind its whole generation prompt.
    """

    left_out: tuple[str, ...] = ()
    split_token: int = -1
    unlike_prompt: bool = False

    @classmethod
    def of(cls, samples: Sequence[RenderedSample]) -> Remarks:
        """Joins the warnings about several samples of one row."""
        remarks = [sample.remarks for sample in samples]
        return cls(
            tuple(dict.fromkeys(key for each in remarks for key in each.left_out)),
            next((each.split_token for each in remarks if each.split_token >= 0), -1),
            any(each.unlike_prompt for each in remarks),
        )


@dataclass(frozen=True, slots=True)
class RenderedSample:
    """One sample of S tokens.

    Attributes:
        tokens: [S] int32.
        weights: [S] float32, the weight of each token as a target; the first is 0, nothing comes before it.
        reasons: [S] uint8, values of `Reason`.
        turns: [S] int32, the message a token belongs to (the template's text before a message belongs to it), or -1;
            each step of an answer in steps counts as a message.
        where: the row, for messages.
        branches: the branches of a tree (see `danlu.core.types.Sample`), with the facts [branches] of each.
        remarks: lost when it is cut.
    """

    tokens: np.ndarray
    weights: np.ndarray
    reasons: np.ndarray
    turns: np.ndarray
    where: str
    branches: tuple[Branch, ...] = ()
    facts: Mapping[str, np.ndarray] = field(default_factory=dict)
    remarks: Remarks = Remarks()

    def part(self, start: int, stop: int) -> RenderedSample:
        """Tokens `start` to `stop` as a sample of its own."""
        weights = self.weights[start:stop].copy()
        weights[:1] = 0
        return RenderedSample(
            self.tokens[start:stop], weights, self.reasons[start:stop], self.turns[start:stop], self.where
        )

    def taken(self, places: np.ndarray | slice) -> RenderedSample:
        """The tokens at some places, each with its own weight: unlike in `part`, the first is predicted."""
        tokens, weights, reasons, turns = (
            column[places] for column in (self.tokens, self.weights, self.reasons, self.turns)
        )
        return replace(self, tokens=tokens, weights=weights, reasons=reasons, turns=turns)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A text before it is tokenised: spans with their labels, and single tokens to put before and after it."""

    text: str
    stops: Sequence[int]
    reasons: Sequence[int]
    turns: Sequence[int]
    weights: Sequence[float]
    first_token: int | None = None
    last_token: int | None = None
    last_label: tuple[Reason, int, float] = (Reason.EOS, -1, 1.0)
    remarks: Remarks = Remarks()


def render_rows(
    rows: Sequence[Row], wheres: Sequence[str], tokenizer: Tokenizer, rendering: RenderSettings
) -> list[list[RenderedSample] | DataError]:
    """Returns the samples of each row, or the error that refuses it.

    A row is one sample, or several where the chat template rewrites history (see `danlu.data.message_spans`).

    Raises:
        DataError: every row needs something that the tokenizer lacks (a chat template, an end-of-text token).
    """
    renderer = _renderer(tokenizer, rendering)
    drafts: list[_Draft] = []
    owners: list[int] = []
    outcomes: list[list[RenderedSample] | DataError] = []
    for number, (row, where) in enumerate(zip(rows, wheres, strict=True)):
        if isinstance(row, Tokenized):
            outcomes.append(_pretokenized(row, where, tokenizer))
            continue
        renderer.prepare(row)
        try:
            row_drafts = renderer.drafts(row)
        except DataError as error:
            outcomes.append(DataError(f"{where}: {error}"))
        except UnicodeEncodeError as error:
            outcomes.append(DataError(f"{where}: {half_character(error)}"))
        else:
            drafts += row_drafts
            owners += [number] * len(row_drafts)
            outcomes.append([])
    for owner, rendered in zip(owners, _outcomes(drafts, [wheres[owner] for owner in owners], tokenizer), strict=True):
        target = outcomes[owner]
        if isinstance(rendered, DataError):
            outcomes[owner] = rendered
        elif isinstance(target, list):
            target.append(rendered)
    return outcomes


class _Renderer:
    """Turns rows into drafts, and caches facts about the templates."""

    def __init__(self, tokenizer: Tokenizer, rendering: RenderSettings) -> None:
        self._tokenizer = tokenizer
        self._rendering = rendering
        self._bos = tokenizer.bos_id if tokenizer.adds_bos else None
        self._span_renderers: dict[bool, tuple[ChatTemplate, SpanRenderer]] = {}

    def prepare(self, row: Conversation | Text | Completion) -> None:
        """Checks that the tokenizer has everything that rows of this kind need.

        Raises:
            DataError: there is no chat template, it does not compile or takes no conversation, or there is no token to
                end a text with.
        """
        if not isinstance(row, Conversation):
            self._eos()
        elif (tools := bool(row.tools)) not in self._span_renderers:
            template = self._tokenizer.template(tools)
            if not template.terminators:
                self._eos()
            self._span_renderers[tools] = template, SpanRenderer(template, self._tokenizer.offsets_in_bytes)

    def _eos(self) -> int | None:
        return self._tokenizer.require_eos() if self._rendering.append_eos else None

    def drafts(self, row: Conversation | Text | Completion) -> list[_Draft]:
        """The texts of a row's samples with their labels.

        Raises:
            DataError: the template cannot express the row, or refuses it.
            UnicodeEncodeError: the text holds a lone surrogate.
        """
        drafts = self._conversation(row) if isinstance(row, Conversation) else [self._plain(row)]
        if not isinstance(row, Text) and row.step_stops:
            drafts = [self._in_steps(drafts[0], row)]
        for draft in drafts:
            if not draft.text.isascii():
                draft.text.encode()
        return drafts

    def _plain(self, row: Text | Completion) -> _Draft:
        if isinstance(row, Text):
            bos, eos = self._bos if row.begins else None, self._eos() if row.ends else None
            return _Draft(row.text, [self._size(row.text)], [Reason.TEXT], [-1], [1.0], bos, eos)
        size = self._size(row.prompt)
        stops = [size, size + self._size(row.completion)]
        weights = [1.0 if self._rendering.train_on == "all" else 0.0, 1.0]
        reasons = [Reason.PROMPT, Reason.COMPLETION]
        return _Draft(row.prompt + row.completion, stops, reasons, [-1, -1], weights, self._bos, self._eos())

    def _in_steps(self, draft: _Draft, row: Conversation | Completion) -> _Draft:
        """Returns the draft with a turn number for each step of its last answer, and for the tokens that close the last
        one.

        Raises:
            DataError: the template changes the answer, so that its steps cannot be found.
        """
        answer = row.completion if isinstance(row, Completion) else row.messages[-1].content
        start = draft.text.rfind(answer)
        if start < 0:
            raise DataError("the chat template changes the answer, so its steps cannot be found in the text")
        first_step = max(0, draft.turns[-1])
        ends = [self._size(draft.text[: start + stop]) for stop in row.step_stops[:-1]]
        begin = self._size(draft.text[:start])
        stops, reasons, turns, weights = [], [], [], []
        span_start = 0
        for stop, reason, turn, weight in zip(draft.stops, draft.reasons, draft.turns, draft.weights, strict=True):
            for end in [*(end for end in ends if span_start < end < stop), stop]:
                is_answer = end > begin
                stops.append(end)
                reasons.append(reason)
                turns.append(first_step + sum(before < end for before in ends) if is_answer else turn)
                weights.append(weight)
            span_start = stop
        reason, _, weight = draft.last_label
        return replace(
            draft,
            stops=stops,
            reasons=reasons,
            turns=turns,
            weights=weights,
            last_label=(reason, first_step + len(ends), weight),
        )

    def _size(self, text: str) -> int:
        return len(text.encode()) if self._tokenizer.offsets_in_bytes else len(text)

    def _conversation(self, row: Conversation) -> list[_Draft]:
        template, spans = self._span_renderers[bool(row.tools)]
        messages = shown_messages(row, template, self._rendering.system)
        weights = _turn_weights(messages, self._rendering.train_on)
        wanted = tuple([i for i, message in enumerate(messages) if message.role == "assistant" and weights[i] > 0])
        turns = [turn_of(message) for message in messages]
        texts = spans.annotate(turns, row.tools, wanted)
        for text in texts:
            _require_answers(text, [i for i in text.trained if weights[i] > 0 and messages[i].content])
        begun = next((number for number, message in enumerate(messages) if message.begun), None)
        drafts = [self._draft(text, weights, begun, whole=number == 0) for number, text in enumerate(texts)]
        if begun is not None:
            before = render_begun(
                lambda shown: template.render(shown, row.tools),
                [*turns[:begun], turn_of(messages[begun].beginning)],
            )
            drafts = [
                self._with_beginning(draft, begun, before, template) if begun in text.trained else draft
                for draft, text in zip(drafts, texts, strict=True)
            ]
        # Turns that are rewritten later on are all trained in samples of their own; the whole may then train nothing.
        drafts = drafts if any(drafts[0].weights) or len(drafts) == 1 else drafts[1:]
        if left_out := tuple(dict.fromkeys(part.key for part in texts[0].left_out)):
            drafts[0] = replace(drafts[0], remarks=replace(drafts[0].remarks, left_out=left_out))
        return drafts

    def _with_beginning(self, draft: _Draft, turn: int, before: str, template: ChatTemplate) -> _Draft:
        """Returns the draft with the beginning of a turn as context.

        before: the prompt, which ends with the beginning.
        Raises DataError where the template shows the beginning otherwise in the whole turn.
        """
        if template.common_prefix_length(before, draft.text) < len(before):
            raise DataError(
                f"message {turn + 1}: the chat template shows the turn that the prompt has begun otherwise once the "
                "answer goes on with it (it moves thoughts, for example). End the prompt with the user's turn, or name "
                "another template in model.chat_template"
            )
        border, context = self._size(before), 1.0 if self._rendering.train_on == "all" else 0.0
        stops, reasons, weights = list[int](), list[int](), list[float]()
        turns, start = list[int](), 0
        for stop, reason, owner, weight in zip(draft.stops, draft.reasons, draft.turns, draft.weights, strict=True):
            for end in (border, stop) if start < border < stop else (stop,):
                stops.append(end)
                reasons.append(reason)
                turns.append(owner)
                weights.append(context if owner == turn and end <= border and weight else weight)
            start = stop
        return replace(draft, stops=stops, reasons=reasons, turns=turns, weights=weights)

    def _draft(
        self, annotated: AnnotatedText, turn_weights: Sequence[float], begun: int | None, *, whole: bool
    ) -> _Draft:
        on_template = 1.0 if whole and self._rendering.train_on == "all" else 0.0
        weights = []
        for reason, turn in zip(annotated.reasons, annotated.turns, strict=True):
            if reason is Reason.TEMPLATE:
                weights.append(on_template)
            elif reason in _ASSISTANT_REASONS:
                weights.append(turn_weights[turn] if turn in annotated.trained else 0.0)
            else:
                weights.append(turn_weights[turn] if whole else 0.0)
        # A turn that is begun stands behind its beginning, and not behind the generation prompt.
        drawn = {turn for turn in annotated.trained if turn_weights[turn] > 0 and turn != begun}
        last = annotated.turns[-1]
        close = not annotated.closed and last in annotated.trained  # the template has no token that closes an answer
        return _Draft(
            annotated.text,
            annotated.stops,
            annotated.reasons,
            annotated.turns,
            weights,
            last_token=self._eos() if close else None,
            last_label=(Reason.TERMINATOR, last, turn_weights[last]),
            remarks=Remarks(unlike_prompt=not annotated.unlike_prompt.isdisjoint(drawn)),
        )


_renderer = lru_cache(maxsize=4)(_Renderer)
"""Cached for the next rows: finding the facts about a template takes longer than rendering a row."""


def shown_messages(row: Conversation, template: ChatTemplate, system: str | None) -> tuple[Message, ...]:
    """The messages as the template can show them, behind a system message: their own, else `system`.

    Raises:
        DataError: it cannot show tools or tool calls, which then would be left out without a word.
    """
    messages = row.messages
    if system is not None and messages[0].role != "system":
        messages = (Message("system", system), *messages)
    if messages[0].role == "system" and not template.takes_system:
        # Templates without a place for it (Gemma's) have the system text in front of the first user message.
        first = next(number for number, message in enumerate(messages) if message.role != "system")
        texts = [message.content for message in messages[: first + 1]]
        messages = (replace(messages[first], content="\n\n".join(texts)), *messages[first + 1 :])
    if row.tools and not template.takes_tools:
        raise DataError("the chat template has no place for tools; name one that has in model.chat_template")
    if not template.takes_calls and any(message.tool_calls or message.role == "tool" for message in messages):
        raise DataError(
            "the chat template leaves out tool calls or results; name one that shows them in model.chat_template"
        )
    return messages


def _require_answers(annotated: AnnotatedText, trained: Collection[int]) -> None:
    """Raises DataError for a trained turn with content where the template writes only the end of the turn."""
    spans = zip(annotated.reasons, annotated.turns, strict=True)
    empty = set(trained) - {turn for reason, turn in spans if reason in (Reason.ASSISTANT, Reason.REASONING)}
    if empty:
        raise DataError(
            f"message {min(empty) + 1}: of this answer the chat template writes no more than what ends it, and the "
            "end alone would be trained. Name a template that shows the answer in model.chat_template"
        )


def half_character(error: UnicodeEncodeError) -> str:
    """Returns the error message for a text that has no UTF-8, with a remedy."""
    half = ascii(error.object[error.start]).strip("'")
    return (
        f"the text holds {half}, half a character (a lone surrogate), which cannot be tokenised; write the whole "
        "character or remove it"
    )


def _turn_weights(messages: Sequence[Message], train_on: str) -> list[float]:
    """Returns the loss weight of each message: its own, else the one that `train_on` gives its role."""
    last = max(number for number, message in enumerate(messages) if message.role == "assistant")
    weights = []
    for number, message in enumerate(messages):
        if message.weight is not None:
            weights.append(message.weight)
        elif train_on == "all":
            weights.append(1.0)
        else:
            is_answer = message.role == "assistant" and not message.is_context
            weights.append(float(is_answer and (train_on == "assistant" or number == last)))
    return weights


def _outcomes(
    drafts: Sequence[_Draft], wheres: Sequence[str], tokenizer: Tokenizer
) -> Sequence[RenderedSample | DataError]:
    """Returns the sample of each draft, or the error where a word has no token."""
    try:
        return _tokenised(drafts, wheres, tokenizer)
    except DataError as error:
        if len(drafts) == 1:
            return [DataError(f"{wheres[0]}: {error}")]
        return [_outcomes([draft], [where], tokenizer)[0] for draft, where in zip(drafts, wheres, strict=True)]


def _tokenised(drafts: Sequence[_Draft], wheres: Sequence[str], tokenizer: Tokenizer) -> list[RenderedSample]:
    if not drafts:
        return []
    encoded = tokenizer.encode_many([draft.text for draft in drafts])
    span_of, split_tokens = _span_of_token(drafts, encoded)
    weights = np.array([weight for draft in drafts for weight in draft.weights], np.float32)[span_of]
    reasons = np.array([reason for draft in drafts for reason in draft.reasons], np.uint8)[span_of]
    turns = np.array([turn for draft in drafts for turn in draft.turns], np.int32)[span_of]
    result, start = [], 0
    stops = np.cumsum(encoded.counts).tolist()
    for number, (draft, where, stop) in enumerate(zip(drafts, wheres, stops, strict=True)):
        part = slice(start, stop)
        sample = RenderedSample(encoded.ids[part], weights[part], reasons[part], turns[part], where)
        if number in split_tokens or draft.remarks != Remarks():
            sample = replace(sample, remarks=replace(draft.remarks, split_token=split_tokens.get(number, -1)))
        if draft.first_token is not None:
            sample = _with_token(sample, draft.first_token, (Reason.BOS, -1, 0.0), at_end=False)
        if draft.last_token is not None:
            sample = _with_token(sample, draft.last_token, draft.last_label, at_end=True)
        sample.weights[:1] = 0
        result.append(sample)
        start = stop
    return result


def _span_of_token(drafts: Sequence[_Draft], encoded: Encoded) -> tuple[np.ndarray, dict[int, int]]:
    """[T] int64: for each token the span it belongs to, counted over all drafts; and by the number of a draft the first
    token that begins in the prompt of a trained answer and ends in the answer."""
    bases = np.concatenate([[0], np.cumsum(encoded.sizes)[:-1]])
    spans = [len(draft.stops) for draft in drafts]
    borders = np.array([stop for draft in drafts for stop in draft.stops], np.int64) + np.repeat(bases, spans)
    after = np.searchsorted(encoded.starts, borders)  # the first token that begins at or behind each border
    last = np.cumsum(spans) - 1  # the last span of each text
    after[last] = np.cumsum(encoded.counts)  # the last span takes whatever tokens of its text are left
    span_of = np.repeat(np.arange(len(borders)), np.diff(after, prepend=0))
    # A token across a border was counted to the span it begins in.
    crossed = np.flatnonzero((after > 0) & (encoded.stops[np.maximum(after - 1, 0)] > borders))
    split_tokens: dict[int, int] = {}
    if len(crossed):
        weights = [weight for draft in drafts for weight in draft.weights]
        reasons = [reason for draft in drafts for reason in draft.reasons]
        turns = [turn for draft in drafts for turn in draft.turns]
        for border in np.setdiff1d(crossed, last).tolist():
            token = after[border] - 1
            if weights[border + 1] > 0 and weights[span_of[token]] == 0:
                span_of[token] = border + 1
            is_begun = weights[border] == 0 and turns[border] == turns[border + 1]  # the turn, by the prompt
            is_prompt = reasons[border] in _PROMPT_ENDS or is_begun
            if weights[border + 1] > 0 and reasons[border + 1] in _ANSWER_BEGINS and is_prompt:
                split_tokens.setdefault(int(np.searchsorted(last, border)), int(encoded.ids[token]))
    return span_of, split_tokens


def _with_token(
    rendered: RenderedSample, token: int, label: tuple[Reason, int, float], *, at_end: bool
) -> RenderedSample:
    """The sample with a token before or behind it; one that the text brings itself takes its place."""
    reason, turn, weight = label
    has_own = len(rendered.tokens) and rendered.tokens[-1 if at_end else 0] == token
    rest = slice(0, -1 if has_own else None) if at_end else slice(1 if has_own else 0, None)

    def join(column: np.ndarray, value: float) -> np.ndarray:
        added = np.array([value], column.dtype)
        return np.concatenate([column[rest], added] if at_end else [added, column[rest]])

    return replace(
        rendered,
        tokens=join(rendered.tokens, token),
        weights=join(rendered.weights, weight),
        reasons=join(rendered.reasons, reason),
        turns=join(rendered.turns, turn),
    )


def _pretokenized(row: Tokenized, where: str, tokenizer: Tokenizer) -> list[RenderedSample] | DataError:
    """Returns a row of given tokens as a sample; an error if a token is not in the vocabulary."""
    outside = row.tokens[(row.tokens < 0) | (row.tokens >= tokenizer.vocab_size)]
    if len(outside):
        vocabulary = f"the vocabulary of {tokenizer.path} (0 to {tokenizer.vocab_size - 1})"
        problem = f"{where}: token {outside[0]} is not in {vocabulary}"
        return DataError(f"{problem}; use the tokenizer that made these rows")
    weights = row.weights.copy()
    weights[0] = 0
    reasons = np.where(row.weights > 0, Reason.TEXT, Reason.PROMPT).astype(np.uint8)
    return [RenderedSample(row.tokens, weights, reasons, np.full(len(row.tokens), -1, np.int32), where)]


def untrained_terminator(rendered: RenderedSample) -> str | None:
    """Returns a message if a sample trains answers but no token that ends one; None if it trains one, or no answer."""
    trained = rendered.reasons[rendered.weights > 0]
    if (
        not np.isin(trained, (Reason.ASSISTANT, Reason.COMPLETION)).any()
        or np.isin(trained, (Reason.TERMINATOR, Reason.EOS)).any()
    ):
        return None
    return (
        f"{rendered.where}: answers are trained, but not the token that ends them, so the model would not learn to "
        "stop. Set data.append_eos: true, use a chat template that closes the assistant's turn with a token "
        "(model.chat_template), or raise data.max_length if every answer is cut off"
    )
