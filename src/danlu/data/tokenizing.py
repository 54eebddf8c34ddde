"""The work of a worker process on a chunk of rows: parse_row, render, cut to length, count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from danlu.core.errors import DataError
from danlu.data.message_spans import Reason
from danlu.data.messages import Conversation
from danlu.data.preference_rows import AnswerRow, JudgedAnswer, Pair, answers_of, parse_answers
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.render import Remarks, RenderedSample, RenderSettings, render_rows, untrained_terminator
from danlu.data.rows import Format, Row, Tokenized, parse_row, unread_keys
from danlu.data.samples import SampleBlock, TreeTable
from danlu.data.statistics import Statistics
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tokenizer_folder import tokenizer_fingerprint
from danlu.data.tokenizer_info import TokenizerInfo, tokenizer_info
from danlu.recipe.sections.base import RowType

if TYPE_CHECKING:  # a quarter of a second at the start of every tokenising process
    from danlu.recipe.sections import Data

CHUNK_ROWS = 256
CHUNK_CHARACTERS = 2_000_000

_ANSWER = (Reason.ASSISTANT, Reason.COMPLETION)
_END = (Reason.TERMINATOR, Reason.EOS)
# Where a row's own text stands, with nothing of the template's.
_ROWS_TEXT = (Reason.SYSTEM, Reason.USER, Reason.TOOL, Reason.TEXT, Reason.PROMPT, Reason.COMPLETION)
_WRITTEN_BY_ASSISTANT = (Reason.ASSISTANT, Reason.REASONING)  # with marks of the template's, but none that ends a turn


@dataclass(frozen=True)
class TokenizeSettings:
    """Everything besides the row itself and the tokenizer that decides a row's samples; part of the cache's key."""

    format: Format | Literal["auto"]
    rendering: RenderSettings
    max_length: int | None  # None: documents are joined and cut by the packing
    overlong: Literal["truncate", "split", "drop"]
    row_type: RowType | None = None  # of rows with compared or judged answers, which become trees

    @classmethod
    def of(cls, data: Data, format: Format | Literal["auto"], row_type: RowType | None = None) -> TokenizeSettings:
        return cls(
            format=format,
            rendering=RenderSettings(train_on=data.train_on, system=data.system, append_eos=data.append_eos),
            max_length=None if data.packing.kind == "concatenate" else data.max_length,
            overlong=data.overlong,
            row_type=row_type,
        )

    def parse(self, row: Mapping[str, Any], where: str) -> Row | AnswerRow:
        """Parses a raw row. Raises DataError if it does not fit its format or makes no sense."""
        if self.row_type is None:
            return parse_row(row, self.format, where)
        return parse_answers(row, self.format, self.row_type, where)

    def render(
        self, rows: Sequence[Row | AnswerRow], wheres: Sequence[str], tokenizer: Tokenizer
    ) -> list[list[RenderedSample] | DataError]:
        """Returns the samples of each row from `parse`, or the error that refuses it.

        Raises:
            DataError: every row needs something that the tokenizer lacks.
        """
        if self.row_type is None:
            return render_rows(cast(Sequence[Row], rows), wheres, tokenizer, self.rendering)
        from danlu.data.answer_trees import render_answers

        trees = render_answers(cast(Sequence[AnswerRow], rows), wheres, tokenizer, self.rendering)
        return [tree if isinstance(tree, DataError) else [tree] for tree in trees]


@dataclass(frozen=True)
class TokenizedChunk:
    """A chunk of rows as samples."""

    block: SampleBlock
    statistics: Statistics
    bad: tuple[str, ...]  # a message for each row that cannot be used, in the order of the rows
    tokenizer: TokenizerInfo


Task = tuple[TokenizeSettings, list[RawRow]]


@dataclass(frozen=True)
class TokenizerJob:
    """A job that needs a tokenizer (`danlu.data.worker_pool.Job`): `work`, called with the tokenizer and each task."""

    tokenizer_path: str
    chat_template: str | None
    date: str | None  # that the template writes
    work: Callable[[Tokenizer, Any], Any]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template

    def start(self) -> Callable[[Any], Any]:
        tokenizer = load_tokenizer(self.tokenizer_path, self.chat_template, self.date, self.template_kwargs)
        return partial(self.work, tokenizer)

    def tokenizer_fingerprint(self) -> str:
        """The key of the tokens in the cache, as far as the tokenizer and its template decide them."""
        return tokenizer_fingerprint(self.tokenizer_path, self.chat_template, self.date, self.template_kwargs)


def chunks(raw: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Rows in lists of a size worth sending to another process: by number, and by length where rows are long."""
    chunk: list[RawRow] = []
    characters = 0
    for row in raw:
        chunk.append(row)
        characters += row.size
        if len(chunk) == CHUNK_ROWS or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def tokenise(tokenizer: Tokenizer, task: Task) -> TokenizedChunk:
    """Turns rows into samples; rows that cannot be used are reported, not raised.

    Raises:
        DataError: every row needs something that the tokenizer lacks.
    """
    settings, raw = task
    bad: dict[int, str] = {}
    parsed: list[tuple[RawRow, Row | AnswerRow]] = []
    statistics = Statistics(rows=len(raw))
    for row in raw:
        if isinstance(row.value, BadRow):
            bad[row.index] = row.value.message
            continue
        try:
            parsed.append((row, settings.parse(row.value, row.where)))
        except DataError as error:
            bad[row.index] = str(error)
        else:
            _count_judgement(parsed[-1][1], row.where, statistics)
            statistics.unread.update(unread_keys(row.value, _conversations(parsed[-1][1])))
    outcomes = settings.render([row for _, row in parsed], [place.where for place, _ in parsed], tokenizer)
    samples: list[RenderedSample] = []
    numbers: list[int] = []
    for (place, _), outcome in zip(parsed, outcomes, strict=True):
        if isinstance(outcome, DataError):
            bad[place.index] = str(outcome)
            continue
        kept = _fit(outcome, settings, statistics, tokenizer.bos_id)
        if kept:
            _count_remarks(Remarks.of(outcome), place.where, tokenizer, statistics)
        samples += kept
        numbers += [place.index] * len(kept)
    messages = tuple(bad[number] for number in sorted(bad))
    statistics.add(Statistics(bad_rows=len(bad), bad_examples=list(messages)))
    block = _block(samples, numbers, statistics)
    if len(block):
        rows = {place.index: row for place, row in parsed}
        _count_thoughts(block, rows, statistics)
        _count_specials(block, rows, tokenizer, statistics)
    return TokenizedChunk(block, statistics, messages, tokenizer_info(tokenizer))


def _count_judgement(row: Row | AnswerRow, where: str, statistics: Statistics) -> None:
    if isinstance(row, JudgedAnswer):
        statistics.judgements["desirable" if row.is_desirable else "undesirable"] += 1
    elif isinstance(row, Pair) and row.margin is not None:
        statistics.judgements["margin"] += 1
        statistics.margin_example = statistics.margin_example or where
    elif isinstance(row, Pair):
        statistics.judgements["no margin"] += 1
        statistics.no_margin_example = statistics.no_margin_example or where


def _count_remarks(remarks: Remarks, where: str, tokenizer: Tokenizer, statistics: Statistics) -> None:
    statistics.left_out.update(remarks.left_out)
    if remarks.left_out:
        statistics.left_out_example = statistics.left_out_example or where
    if remarks.split_token >= 0:
        statistics.split_prompts += 1
        written = f"{where} (the token {tokenizer.decode([remarks.split_token])!r})"
        statistics.split_prompt_example = statistics.split_prompt_example or written
    if remarks.unlike_prompt:
        statistics.unlike_prompts += 1
        statistics.unlike_prompt_example = statistics.unlike_prompt_example or where


def _fit(
    outcome: list[RenderedSample], settings: TokenizeSettings, statistics: Statistics, bos_id: int | None
) -> list[RenderedSample]:
    """Cuts the samples of one row to the length, and returns those that are left."""
    if settings.row_type is not None:
        fitted = [_fit_tree(tree, settings, bos_id) for tree in outcome]
    else:
        fitted = [fit_to_length(rendered, settings.max_length, settings.overlong) for rendered in outcome]
    kept = [sample for part in fitted for sample in part.samples]
    statistics.lost_tokens += sum(part.lost_tokens for part in fitted)
    statistics.shortened.update({part.shortened for part in fitted if part.shortened})
    if not kept:
        statistics.dropped.update([part.dropped for part in fitted if part.dropped][:1])
    return kept


@dataclass(frozen=True)
class Fitted:
    """The outcome of fitting a sample to a length.

    Attributes:
        samples: the remaining samples: one, several after a split, or none. shortened: how it was shortened; None if it
            was short enough. dropped: why none is left.
        lost_tokens: tokens that are in no sample.
    """

    samples: list[RenderedSample]
    shortened: str | None = None
    dropped: str | None = None
    lost_tokens: int = 0


NOTHING_TRAINED = "no token would be trained"
NOTHING_LEFT = "longer than max_length, with no trained token in what was left"
TOO_LONG = "longer than max_length"
NOTHING_LEFT_TO_COMPARE = "longer than max_length, with no answers that differ in what was left"


def _fit_tree(tree: RenderedSample, settings: TokenizeSettings, bos_id: int | None) -> Fitted:
    """Cuts a tree so that its paths have at most `max_length` tokens each: see `danlu.data.tree_length`."""
    from danlu.data.tree_length import fit_answers

    assert settings.max_length is not None, "trees are not joined"
    fitted, shortened = fit_answers(tree, settings.max_length, settings.overlong, bos_id)
    count = len(tree.tokens)
    if fitted is None:
        return Fitted([], shortened, TOO_LONG if shortened == "dropped" else NOTHING_LEFT_TO_COMPARE, count)
    return Fitted([fitted], shortened, None, count - len(fitted.tokens))


def fit_to_length(
    rendered: RenderedSample, max_length: int | None, overlong: Literal["truncate", "split", "drop"]
) -> Fitted:
    """A sample cut to at most `max_length` tokens (None: any length), and dropped if it trains nothing.

    truncate keeps the beginning. split cuts a conversation before a user turn where it can, else anywhere. Where the
    next part would begin with a target it begins with the token before it, as context, so that no target is lost (a
    part of a single token has no room for that). Parts that train nothing are left out.
    """
    count = len(rendered.tokens)
    if not rendered.weights.any():
        return Fitted([], None, NOTHING_TRAINED, count)
    if max_length is None or count <= max_length:
        return Fitted([rendered])
    if overlong == "drop":
        return Fitted([], "dropped", TOO_LONG, count)
    if overlong == "truncate":
        kept = rendered.part(0, max_length)
        if not kept.weights.any():
            return Fitted([], "truncated", NOTHING_LEFT, count)
        return Fitted([kept], "truncated", None, count - max_length)
    parts = [
        (start, stop) for start, stop in _split_ranges(rendered, max_length) if rendered.weights[start + 1 : stop].any()
    ]
    covered = np.zeros(count, bool)
    for start, stop in parts:
        covered[start:stop] = True
    reason = None if parts else NOTHING_LEFT
    return Fitted([rendered.part(*part) for part in parts], "split", reason, int(count - covered.sum()))


def _split_ranges(rendered: RenderedSample, max_length: int) -> list[tuple[int, int]]:
    """Ranges of at most `max_length` tokens that together hold every target."""
    count, start, own, ranges = len(rendered.tokens), 0, 0, []  # own: the first token that is in no part before
    turn_starts = np.flatnonzero(np.diff(rendered.turns)) + 1
    of_users = np.unique(rendered.turns[rendered.reasons == Reason.USER])
    users = turn_starts[np.isin(rendered.turns[turn_starts], of_users[of_users >= 0])]
    while count - start > max_length:
        # A part of one token would train nothing, and the next one needs that token before its first target.
        fitting = users[(users > max(own, start + 1)) & (users <= start + max_length)]
        own = int(fitting[-1]) if len(fitting) else start + max_length
        ranges.append((start, own))
        start = max(own - 1, start + 1) if rendered.weights[own] > 0 else own
    return [*ranges, (start, count)]


def block_of(samples: Sequence[RenderedSample], row_numbers: Sequence[int]) -> SampleBlock:
    """Rendered samples as a block. `row_numbers`: of each, the number of its row in the source."""
    return SampleBlock.of(
        [sample.tokens for sample in samples],
        [sample.weights for sample in samples],
        [sample.reasons for sample in samples],
        row_numbers,
        [sample.where for sample in samples],
        TreeTable.of([sample.branches for sample in samples], [sample.facts for sample in samples])
        if samples and samples[0].branches
        else None,
    )


def _conversations(row: Row | AnswerRow) -> list[Conversation]:
    return [part for part in answers_of(row) if isinstance(part, Conversation)]


def _block(samples: list[RenderedSample], numbers: list[int], statistics: Statistics) -> SampleBlock:
    """The samples as a block, counted."""
    block = block_of(samples, numbers)
    statistics.samples = len(block)
    statistics.tokens = len(block.tokens)
    statistics.longest = int(block.lengths.max(initial=0))
    counts = np.bincount(block.codes, minlength=len(block.palette)).tolist()
    for (weight, reason), count in zip(block.palette.tolist(), counts, strict=True):
        statistics.reasons += Counter({Reason(reason).name.lower(): count})
        statistics.trained_tokens += count if weight > 0 else 0
    if len(block):
        _count_ends(samples, block, statistics)
    return block


def _count_ends(samples: list[RenderedSample], block: SampleBlock, statistics: Statistics) -> None:
    trained = block.palette["weight"] > 0
    answers, ends = (
        np.logical_or.reduceat((trained & np.isin(block.palette["reason"], kind))[block.codes], block.offsets[:-1])
        for kind in (_ANSWER, _END)
    )
    if block.trees is not None:  # an answer of a pair may end, and the other not
        ends &= [all(map(_is_ended, _answers(sample))) for sample in samples]
    endless = np.flatnonzero(answers & ~ends)
    statistics.answers = int(answers.sum())
    statistics.endless_answers = len(endless)
    if len(endless):
        first = samples[int(endless[0])]
        unended = next((part for part in _answers(first) if not _is_ended(part)), first)
        statistics.endless_example = untrained_terminator(unended) or ""


def _answers(sample: RenderedSample) -> list[RenderedSample]:
    """The branches of a tree that nothing follows."""
    parents = {branch.parent for branch in sample.branches}
    return [
        replace(sample.part(branch.start, branch.stop), weights=sample.weights[branch.start : branch.stop])
        for number, branch in enumerate(sample.branches)
        if number not in parents
    ]


def _is_ended(answer: RenderedSample) -> bool:
    return untrained_terminator(answer) is None


def _count_thoughts(block: SampleBlock, rows: Mapping[int, Row | AnswerRow], statistics: Statistics) -> None:
    """Samples with trained thoughts of rows that have none: the chat template has put them there."""
    is_thought = (block.palette["weight"] > 0) & (block.palette["reason"] == Reason.REASONING)
    if not is_thought.any():
        return
    for number in np.flatnonzero(np.logical_or.reduceat(is_thought[block.codes], block.offsets[:-1])).tolist():
        conversations = _conversations(rows[int(block.row_numbers[number])])
        if conversations and not any(
            message.reasoning_content or "think>" in message.content
            for conversation in conversations
            for message in conversation.messages
        ):
            statistics.added_thoughts += 1
            statistics.added_thought_example = statistics.added_thought_example or block.rows[number]


def _count_specials(
    block: SampleBlock, rows: Mapping[int, Row | AnswerRow], tokenizer: Tokenizer, statistics: Statistics
) -> None:
    """Counts samples with special tokens written out in their row, by token.

    Rows of given tokens are not counted: their special tokens are meant.
    """
    is_text, is_own = (np.isin(block.palette["reason"], kind) for kind in (_ROWS_TEXT, _WRITTEN_BY_ASSISTANT))
    is_special, ends_turn = (np.zeros(tokenizer.vocab_size, bool) for _ in range(2))
    is_special[list(tokenizer.special_ids)] = True
    ends_turn[list(tokenizer.end_of_turn_ids)] = True
    is_written = is_special[block.tokens] & is_text[block.codes] | ends_turn[block.tokens] & is_own[block.codes]
    places = np.flatnonzero(is_written)
    numbers = np.searchsorted(block.offsets, places, side="right") - 1
    for number, token in dict.fromkeys(zip(numbers.tolist(), block.tokens[places].tolist(), strict=True)):
        if not isinstance(rows[int(block.row_numbers[number])], Tokenized):
            statistics.written_specials[tokenizer.decode([token])] += 1
            statistics.written_special_example = statistics.written_special_example or block.rows[number]
