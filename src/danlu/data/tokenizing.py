"""What a worker process does with a chunk of rows: parse_row, render, cut to length, count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from danlu.data.message_spans import Reason
from danlu.data.messages import Conversation
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.render import RenderedSample, RenderSettings, render_rows, untrained_terminator
from danlu.data.rows import Format, Row, Tokenized, parse_row, unread_keys
from danlu.data.samples import SampleBlock
from danlu.data.statistics import Statistics
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.truncation import fit_to_length
from danlu.errors import DataError

if TYPE_CHECKING:  # a quarter of a second at the start of every tokenising process
    from danlu.recipe.sections import Data

CHUNK_ROWS = 256
CHUNK_CHARACTERS = 2_000_000

_IS_ANSWER = np.zeros(256, bool)
_IS_ANSWER[[Reason.ASSISTANT, Reason.COMPLETION]] = True
_IS_ROWS_TEXT = np.zeros(256, bool)  # where a row's own text stands, with nothing of the template's
_IS_ROWS_TEXT[[Reason.SYSTEM, Reason.USER, Reason.TOOL, Reason.TEXT, Reason.PROMPT, Reason.COMPLETION]] = True
_IS_OWN = np.zeros(256, bool)  # where the template may put marks of its own, but none that ends a turn
_IS_OWN[[Reason.ASSISTANT, Reason.REASONING]] = True
_IS_THOUGHT = np.zeros(256, bool)
_IS_THOUGHT[Reason.REASONING] = True
_IS_END = np.zeros(256, bool)
_IS_END[[Reason.TERMINATOR, Reason.EOS]] = True


@dataclass(frozen=True)
class TokenizeSettings:
    """Everything besides the rows and the tokenizer that decides what a row becomes; part of the cache's key."""

    format: Format | Literal["auto"]
    rendering: RenderSettings
    max_length: int | None  # None: documents are joined and cut by the packing
    overlong: Literal["truncate", "split", "drop"]

    @classmethod
    def of(cls, data: Data, format: Format | Literal["auto"]) -> TokenizeSettings:
        return cls(
            format=format,
            rendering=RenderSettings(train_on=data.train_on, system=data.system, append_eos=data.append_eos),
            max_length=None if data.packing.kind == "concatenate" else data.max_length,
            overlong=data.overlong,
        )


@dataclass(frozen=True)
class TokenizerInfo:
    """What the rest of a run needs to know of the tokenizer without loading it."""

    vocab_size: int  # ids go from 0 to vocab_size - 1
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    end_of_turn_ids: tuple[int, ...]  # where generation stops
    missing_bytes: int = 0  # see `Tokenizer.missing_bytes`

    @property
    def warning(self) -> str | None:
        """What to tell people of a tokenizer that loses text; None for one that does not."""
        if not self.missing_bytes:
            return None
        return (
            f"tokenizer: it has no token for {self.missing_bytes} of the 256 bytes, and text loses them without a "
            "trace; use one that has them all"
        )


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """The facts of a tokenizer that is loaded."""
    return TokenizerInfo(
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        end_of_turn_ids=tokenizer.end_of_turn_ids,
        missing_bytes=tokenizer.missing_bytes,
    )


@dataclass(frozen=True)
class TokenizedChunk:
    """A chunk of rows as samples."""

    block: SampleBlock
    statistics: Statistics
    bad: tuple[str, ...]  # a message for each row that cannot be used, in the order of the rows
    tokenizer: TokenizerInfo


Task = tuple[TokenizeSettings, list[RawRow]]


@dataclass(frozen=True)
class TokenizeJob:
    """The job of a worker process (`danlu.data.worker_pool.Job`)."""

    tokenizer_path: str
    chat_template: str | None
    date: str | None = None  # that the template writes

    def start(self) -> Callable[[Task], TokenizedChunk]:
        tokenizer = load_tokenizer(self.tokenizer_path, self.chat_template, self.date)
        return partial(tokenise, tokenizer, tokenizer_info(tokenizer))


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


def tokenise(tokenizer: Tokenizer, info: TokenizerInfo, task: Task) -> TokenizedChunk:
    """Rows as samples; rows that cannot be used are reported, not raised.

    Raises:
        DataError: the tokenizer lacks what every row needs.
    """
    settings, raw = task
    bad: dict[int, str] = {}
    parsed: list[tuple[RawRow, Row]] = []
    statistics = Statistics(rows=len(raw))
    for row in raw:
        if isinstance(row.value, BadRow):
            bad[row.index] = row.value.message
            continue
        try:
            parsed.append((row, parse_row(row.value, settings.format, row.where)))
        except DataError as error:
            bad[row.index] = str(error)
        else:
            statistics.unread.update(unread_keys(row.value, parsed[-1][1]))
    outcomes = render_rows(
        [row for _, row in parsed], [place.where for place, _ in parsed], tokenizer, settings.rendering
    )
    samples: list[RenderedSample] = []
    numbers: list[int] = []
    for (place, _), outcome in zip(parsed, outcomes, strict=True):
        if isinstance(outcome, DataError):
            bad[place.index] = str(outcome)
            continue
        kept = _fit(outcome, settings, statistics)
        samples += kept
        numbers += [place.index] * len(kept)
    messages = tuple(bad[number] for number in sorted(bad))
    statistics.add(Statistics(bad_rows=len(bad), bad_examples=list(messages)))
    block = _block(samples, numbers, statistics)
    if len(block):
        rows = {place.index: row for place, row in parsed}
        _count_thoughts(block, rows, statistics)
        _count_specials(block, rows, tokenizer, statistics)
    return TokenizedChunk(block, statistics, messages, info)


def _fit(outcome: list[RenderedSample], settings: TokenizeSettings, statistics: Statistics) -> list[RenderedSample]:
    """What is left of the samples of one row."""
    kept: list[RenderedSample] = []
    shortened: set[str] = set()
    dropped: str | None = None
    for rendered in outcome:
        fitted = fit_to_length(rendered, settings.max_length, settings.overlong)
        kept += fitted.samples
        statistics.lost_tokens += fitted.lost_tokens
        if fitted.shortened:
            shortened.add(fitted.shortened)
        dropped = dropped or fitted.dropped
    statistics.shortened.update(shortened)
    if dropped and not kept:
        statistics.dropped[dropped] += 1
    return kept


def block_of(samples: Sequence[RenderedSample], row_numbers: Sequence[int]) -> SampleBlock:
    """Rendered samples as a block. `row_numbers`: of each, the number of its row in the source."""
    return SampleBlock.of(
        [sample.tokens for sample in samples],
        [sample.weights for sample in samples],
        [sample.reasons for sample in samples],
        row_numbers,
        [sample.where for sample in samples],
    )


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
        np.logical_or.reduceat((trained & kind[block.palette["reason"]])[block.codes], block.offsets[:-1])
        for kind in (_IS_ANSWER, _IS_END)
    )
    endless = np.flatnonzero(answers & ~ends)
    statistics.answers = int(answers.sum())
    statistics.endless_answers = len(endless)
    if len(endless):
        statistics.endless_example = untrained_terminator(samples[int(endless[0])]) or ""


def _count_thoughts(block: SampleBlock, rows: Mapping[int, Row], statistics: Statistics) -> None:
    """Samples with trained thoughts of rows that have none: the chat template has put them there."""
    is_thought = (block.palette["weight"] > 0) & _IS_THOUGHT[block.palette["reason"]]
    if not is_thought.any():
        return
    for number in np.flatnonzero(np.logical_or.reduceat(is_thought[block.codes], block.offsets[:-1])).tolist():
        row = rows[int(block.row_numbers[number])]
        if isinstance(row, Conversation) and not any(
            message.reasoning_content or "think>" in message.content for message in row.messages
        ):
            statistics.added_thoughts += 1
            statistics.added_thought_example = statistics.added_thought_example or block.rows[number]


def _count_specials(block: SampleBlock, rows: Mapping[int, Row], tokenizer: Tokenizer, statistics: Statistics) -> None:
    """Samples whose row has written out special tokens, by token. Rows that are given as tokens mean theirs."""
    reasons = block.palette["reason"]
    is_text, is_own = _IS_ROWS_TEXT[reasons], _IS_OWN[reasons]
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
