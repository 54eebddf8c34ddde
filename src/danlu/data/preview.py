"""Rows of a recipe's data token by token, shown by `danlu preview` before anything is trained.

Rows are rendered by the functions that fill the token cache, so they can be shown before a large data set is tokenised,
and when it never will be because a run would refuse it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from danlu.core.errors import DataError, RecipeError
from danlu.core.types import Sample
from danlu.data.message_spans import Reason
from danlu.data.prepare import DatasetSpec, read
from danlu.data.prompts import Prompt, PromptSettings, render_prompts
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.samples import SampleBlock
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizing import TokenizeSettings, block_of, tokenise
from danlu.data.worker_pool import WorkerPool
from danlu.recipe.sections.base import RowType

SourceRows = tuple[int, TokenizeSettings | PromptSettings, list[RawRow]]
"""The number of a source, its settings and the rows to show."""


class PreviewBranch(NamedTuple):
    """A branch of a sample that is a tree: its title, the branch that it continues (-1: none), its tokens."""

    title: str
    parent: int
    start: int
    stop: int


@dataclass(frozen=True)
class PreviewSample:
    """A sample of S tokens.

    Attributes:
        tokens: [S] int32.
        weights: [S] float32, 0 = context only.
        reasons: [S] uint8, values of `Reason`.
        special: [S] bool, tokens that no text contains by its letters alone.
        texts: [S] the text of each token, see `token_texts`.
        branches: of a tree; empty where the sample is none.
    """

    tokens: np.ndarray
    weights: np.ndarray
    reasons: np.ndarray
    special: np.ndarray
    texts: tuple[str, ...]
    branches: tuple[PreviewBranch, ...] = ()


@dataclass(frozen=True)
class PreviewRow:
    """The outcome of one row.

    Attributes:
        source: number of its source in `DatasetSpec.sources`.
        index: its number in the source, from 0.
        where: its place, as messages name it.
        samples: the samples to train on; for a dropped row those that it would have been. bad: why the row cannot be
            used; empty if it can. columns: the columns of a row that cannot be used, as JSON, where it could be read at
            all.
        dropped: why nothing of it is trained on; empty if something is.
        shortened: truncated, split or dropped, if it was longer than max_length; else empty.
        lost_tokens: tokens of it that are in no sample.
    """

    source: int
    index: int
    where: str
    samples: tuple[PreviewSample, ...] = ()
    bad: str = ""
    columns: str = ""
    dropped: str = ""
    shortened: str = ""
    lost_tokens: int = 0


def render_examples(spec: DatasetSpec, *, rows: int, places: Sequence[str] = ()) -> list[PreviewRow]:
    """Rows of every source, rendered: the first `rows` of each, or the ones at `places`.

    Args:
        places: as messages name them ("alpaca.json:17"), or numbers of rows in their source, from 1.

    Raises:
        DataError: a source, the tokenizer or the chat template cannot be used at all. A bad row is no error here.
        RecipeError: there is no row at one of the places.
    """
    tasks: list[SourceRows] = []
    for number, source in enumerate(spec.sources):
        format, raw = read(source, spec)
        chosen = _rows_at(raw, places) if places else list(islice(raw, rows))
        tasks.append((number, spec.settings(format), chosen))
    files = ", ".join(source.path for source in spec.sources)
    missing = [place for place in places if not any(_is_at(row, place) for _, _, chosen in tasks for row in chosen)]
    if missing:
        raise RecipeError([f"--row {place}: there is no such row in {files}" for place in missing])
    with WorkerPool(spec.job(preview_rows), 1) as workers:
        return [row for rows_of_source in workers.map(tasks) for row in rows_of_source]


def preview_rows(tokenizer: Tokenizer, task: SourceRows) -> list[PreviewRow]:
    """Returns the outcome of each row of a source, by the same steps as for a run.

    Raises:
        DataError: every row needs something that the tokenizer lacks.
    """
    source, settings, rows = task
    return [_preview_row(tokenizer, settings, source, row) for row in rows]


def _preview_row(
    tokenizer: Tokenizer, settings: TokenizeSettings | PromptSettings, source: int, row: RawRow
) -> PreviewRow:
    if isinstance(settings, PromptSettings):
        prompts = render_prompts(tokenizer, (settings, [row]))
        counts, bad = prompts.statistics, prompts.bad
        samples = [_prompt_sample(tokenizer, prompt) for prompt in prompts.prompts]
    else:
        chunk = tokenise(tokenizer, (settings, [row]))
        counts, bad = chunk.statistics, chunk.bad
        block = _untruncated(tokenizer, settings, row) if counts.dropped else chunk.block
        samples = [_sample(tokenizer, block, number, settings.row_type) for number in range(len(block))]
    has_columns = bool(bad) and isinstance(row.given, dict)
    return PreviewRow(
        source,
        row.index,
        row.where,
        samples=tuple(samples),
        bad="".join(bad),
        columns=json.dumps(row.given, ensure_ascii=False, default=str) if has_columns else "",
        dropped="".join(counts.dropped),
        shortened="".join(counts.shortened),
        lost_tokens=counts.lost_tokens,
    )


def _untruncated(tokenizer: Tokenizer, settings: TokenizeSettings, row: RawRow) -> SampleBlock:
    """The samples of a row that is dropped, as they are rendered before that."""
    assert not isinstance(row.value, BadRow), "a bad row is not dropped"
    (samples,) = settings.render([settings.parse(row.value, row.where)], [row.where], tokenizer)
    assert not isinstance(samples, DataError), "a row that was rendered before"
    return block_of(samples, [row.index] * len(samples))


def _prompt_sample(tokenizer: Tokenizer, prompt: Prompt) -> PreviewSample:
    """The prompt as context: only the policy's answers are trained."""
    count = len(prompt.tokens)
    reasons = np.full(count, Reason.PROMPT, np.uint8)
    return _shown(tokenizer, np.array(prompt.tokens, np.int32), np.zeros(count, np.float32), reasons)


def _sample(tokenizer: Tokenizer, block: SampleBlock, number: int, row_type: RowType | None) -> PreviewSample:
    sample = block.sample(number)
    branches = () if row_type is None else _branches(sample, row_type)
    return _shown(tokenizer, sample.tokens, sample.weights, block.reasons(number), branches)


def _shown(
    tokenizer: Tokenizer,
    tokens: np.ndarray,
    weights: np.ndarray,
    reasons: np.ndarray,
    branches: tuple[PreviewBranch, ...] = (),
) -> PreviewSample:
    ids = tokens.tolist()
    special = np.array([token in tokenizer.special_ids for token in ids], bool)
    texts = token_texts(tokenizer.token_bytes(ids))
    return PreviewSample(tokens, weights, reasons, special, tuple(texts), branches)


def _branches(sample: Sample, row_type: RowType) -> tuple[PreviewBranch, ...]:
    """Returns the branches of a tree, each with its title."""
    titles: list[str] = []
    for number, label in enumerate(sample.facts["label"].tolist()):
        if number == 0 and len(sample.branches) > 1 and sample.branches[1].parent == 0:
            titles.append("prompt")
        elif row_type == "stepwise":
            titles.append(f"step {number}, {'not judged' if math.isnan(label) else 'right' if label else 'wrong'}")
        elif row_type == "unpaired":
            titles.append("desirable answer" if label else "undesirable answer")
        else:
            margin = float(sample.facts["margin"][number])
            better = "" if math.isnan(margin) else f", by a margin of {margin:g}"
            titles.append(f"chosen{better}" if label else "rejected")
    return tuple(PreviewBranch(title, *branch) for title, branch in zip(titles, sample.branches, strict=True))


def token_texts(tokens: Sequence[bytes]) -> list[str]:
    """Text to show for each token, where characters may be spread over several tokens.

    A character belongs to the token that its first byte is in; a token inside a character has an empty text. Bytes that
    are part of no character show as ‹E9›, a token without bytes as ‹›.
    """
    owners = np.repeat(np.arange(len(tokens)), [len(token) for token in tokens]).tolist()
    texts = ["" if token else "‹›" for token in tokens]
    offset = 0
    for character in b"".join(tokens).decode("utf-8", "surrogateescape"):
        is_byte = "\udc80" <= character <= "\udcff"
        texts[owners[offset]] += f"‹{ord(character) - 0xDC00:02X}›" if is_byte else character
        offset += 1 if is_byte else len(character.encode())
    return texts


def _rows_at(raw: Iterable[RawRow], places: Sequence[str]) -> list[RawRow]:
    """The rows of a source that are at one of the places, as `render_examples` reads them."""
    matching = (row for row in raw if any(_is_at(row, place) for place in places))
    return list(islice(matching, len(places)))  # a place is one row of a source, so no need to read on


def _is_at(row: RawRow, place: str) -> bool:
    """Whether a row is the one that a message names, or the n-th of its source where `place` is a number.

    Messages may say more than the place: a column, a message of the conversation, a folder before it.
    """
    if place.isdecimal():
        return row.index + 1 == int(place)
    folder, match, detail = place.partition(row.where)
    return bool(match) and folder[-1:] in ("", "/") and detail[:1] in ("", ":", " ")
