"""What a recipe trains on, gathered to be looked at: rows token by token, the packs, and counts over everything.

Rows are rendered by the functions that fill the cache, so they can be shown before a large data set is tokenised, and
when it never will be because a run would refuse it. `prepare` then fills the cache a run reads, and what was shown is
compared with what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from danlu.data.message_spans import Reason
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import PreparedData, Progress, Stage, prepare, read, tokenise_rows, worker_count
from danlu.data.render import render_rows
from danlu.data.rows import parse_row
from danlu.data.samples import SampleBlock, Samples, Selection
from danlu.data.sources import BadRow, RawRow
from danlu.data.statistics import Statistics, beyond_positions
from danlu.data.stream import StreamingDataset
from danlu.data.tokenizer import Tokenizer, load_tokenizer, template_date
from danlu.data.tokenizing import Task, TokenizeJob, TokenizerInfo, TokenizeSettings, tokenise, tokenizer_info
from danlu.data.worker_pool import WorkerPool
from danlu.errors import DataError, RecipeError
from danlu.recipe.sections import Data, Source
from danlu.types import Pack


@dataclass(frozen=True)
class PreviewInputs:
    """What `prepare` needs to know of a recipe."""

    data: Data
    stage: Stage
    tokenizer_path: str
    chat_template: str | None
    seed: int
    date: str | None = None  # that the template writes, where it writes one; None for today
    positions: int | None = None
    """Tokens of a sample that the model has positions for, where it is known."""

    @property
    def sources(self) -> list[Source]:
        """Those of data.train, then those of data.eval."""
        return [*self.data.train, *(self.data.eval if isinstance(self.data.eval, list) else [])]

    @property
    def template_date(self) -> str | None:
        """The day that the chat template writes; None where it asks for none."""
        return template_date(self.tokenizer_path, self.chat_template, self.date) if self.stage == "sft" else None


# -- rows token by token ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreviewSample:
    """A sample of S tokens.

    Attributes:
        tokens: [S] int32.
        weights: [S] float32, 0 = context only.
        reasons: [S] uint8, values of `Reason`.
        special: [S] bool, tokens that no text contains by its letters alone.
        texts: [S] the text of each token, see `token_texts`.
    """

    tokens: np.ndarray
    weights: np.ndarray
    reasons: np.ndarray
    special: np.ndarray
    texts: tuple[str, ...]


@dataclass(frozen=True)
class PreviewRow:
    """What became of one row.

    Attributes:
        source: number of its source in `PreviewInputs.sources`.
        index: its number in the source, from 0.
        where: its place, as messages name it.
        samples: what is trained on; for a dropped row what it would have been.
        bad: why the row cannot be used; empty if it can.
        columns: of a row that cannot be used, as JSON, where it could be read at all.
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


@dataclass(frozen=True)
class PreviewJob:
    """The job of the process that renders the rows to show (`danlu.data.worker_pool.Job`)."""

    tokenizer_path: str
    chat_template: str | None
    date: str | None = None

    def start(self) -> Callable[[tuple[int, Task]], list[PreviewRow]]:
        tokenizer = load_tokenizer(self.tokenizer_path, self.chat_template, self.date)
        return partial(preview_rows, tokenizer, tokenizer_info(tokenizer))


def render_examples(of: PreviewInputs, *, rows: int, places: Sequence[str] = ()) -> list[PreviewRow]:
    """Rows of every source, rendered: the first `rows` of each, or the ones at `places`.

    Args:
        places: as messages name them ("alpaca.json:17"), or numbers of rows in their source, from 1.

    Raises:
        DataError: a source, the tokenizer or the chat template cannot be used at all. A bad row is no error here.
        RecipeError: there is no row at one of the places.
    """
    tasks: list[tuple[int, Task]] = []
    missing = list(places)
    for number, source in enumerate(of.sources):
        format, raw = read(source, of.data, of.stage)
        wanted = _at(raw, places) if places else list(islice(raw, rows))
        missing = [place for place in missing if not any(_is_at(row, place) for row in wanted)]
        tasks.append((number, (TokenizeSettings.of(of.data, format), wanted)))
    if missing:
        files = ", ".join(source.path for source in of.sources)
        raise RecipeError([f"--row {place}: there is no such row in {files}" for place in missing])
    with WorkerPool(PreviewJob(of.tokenizer_path, of.chat_template, of.template_date), 1) as workers:
        return [row for part in workers.map(tasks) for row in part]


def preview_rows(tokenizer: Tokenizer, facts: TokenizerInfo, numbered: tuple[int, Task]) -> list[PreviewRow]:
    """What becomes of each row of a source, by the same steps as for training.

    Raises:
        DataError: the tokenizer lacks what every row needs.
    """
    source, (settings, rows) = numbered
    return [_show(tokenizer, facts, settings, source, row) for row in rows]


def _show(
    tokenizer: Tokenizer, facts: TokenizerInfo, settings: TokenizeSettings, source: int, row: RawRow
) -> PreviewRow:
    made = tokenise(tokenizer, facts, (settings, [row]))
    counted, block = made.statistics, made.block
    if counted.dropped:
        block = _whole(tokenizer, settings, row)
    return PreviewRow(
        source,
        row.index,
        row.where,
        samples=tuple(_sample(tokenizer, block, number) for number in range(len(block))),
        bad="".join(made.bad),
        columns=json.dumps(row.value, ensure_ascii=False, default=str)
        if made.bad and isinstance(row.value, dict)
        else "",
        dropped="".join(counted.dropped),
        shortened="".join(counted.shortened),
        lost_tokens=counted.lost_tokens,
    )


def _whole(tokenizer: Tokenizer, settings: TokenizeSettings, row: RawRow) -> SampleBlock:
    """A row that is dropped, as it is before that."""
    assert not isinstance(row.value, BadRow), "a bad row is not dropped"
    meant = parse_row(row.value, settings.format, row.where)
    (samples,) = render_rows([meant], [row.where], tokenizer, settings.rendering)
    assert not isinstance(samples, DataError), "a row that was rendered before"
    return SampleBlock.of(
        [sample.tokens for sample in samples],
        [sample.weights for sample in samples],
        [sample.reasons for sample in samples],
        [row.index] * len(samples),
        [row.where] * len(samples),
    )


def _sample(tokenizer: Tokenizer, block: SampleBlock, number: int) -> PreviewSample:
    sample = block.sample(number)
    ids = sample.tokens.tolist()
    special = np.array([token in tokenizer.special_ids for token in ids], bool)
    texts = token_texts(tokenizer.token_bytes(ids))
    return PreviewSample(sample.tokens, sample.weights, block.reasons(number), special, tuple(texts))


def token_texts(tokens: Sequence[bytes]) -> list[str]:
    """Text to show for each token, where characters may be spread over several tokens.

    A character belongs to the token that its first byte is in; a token inside a character has an empty text. Bytes that
    are part of no character show as ‹E9›, a token without bytes as ‹›.
    """
    owners = np.repeat(np.arange(len(tokens)), [len(token) for token in tokens]).tolist()
    texts = ["" if token else "‹›" for token in tokens]
    at = 0
    for character in b"".join(tokens).decode("utf-8", "surrogateescape"):
        is_byte = "\udc80" <= character <= "\udcff"
        texts[owners[at]] += f"‹{ord(character) - 0xDC00:02X}›" if is_byte else character
        at += 1 if is_byte else len(character.encode())
    return texts


def _at(raw: Iterable[RawRow], places: Sequence[str]) -> list[RawRow]:
    found = (row for row in raw if any(_is_at(row, place) for place in places))
    return list(islice(found, len(places)))  # a place is one row of a source, so no need to read on


def _is_at(row: RawRow, place: str) -> bool:
    """Messages may say more than the place: a column, a message of the conversation, a folder before it."""
    if place.isdecimal():
        return row.index + 1 == int(place)
    folder, found, detail = place.partition(row.where)
    return bool(found) and folder[-1:] in ("", "/") and detail[:1] in ("", ":", " ")


# -- packs and counts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackingSummary:
    """The packs of an epoch, which hold every sample of it once.

    Attributes:
        efficiency: share of their room that holds tokens.
        first: the ones training begins with, in order.
    """

    packs: int
    samples: int
    tokens: int
    efficiency: float
    first: tuple[Pack, ...]


@dataclass(frozen=True)
class SplitSummary:
    """What is trained on, or what is evaluated on.

    Attributes:
        statistics: of the rows as they are read; held-out ones are among those of training.
        lengths: [samples] int32, tokens of each.
        packed: None for data that a run refuses.
    """

    statistics: Statistics
    lengths: np.ndarray
    packed: PackingSummary | None


@dataclass(frozen=True)
class DatasetSummary:
    """The data as a whole.

    Attributes:
        block: only the first block of a stream was looked at.
        changed: rows which the cache, and so a run, holds otherwise than they are rendered now.
        tokenizer: None for a stream.
        date: what the chat template writes, where it writes one.
        beyond: what is to be told of samples longer than the model has positions for.
    """

    train: SplitSummary
    eval: SplitSummary | None
    block: bool
    changed: tuple[str, ...] = ()
    tokenizer: TokenizerInfo | None = None
    date: str | None = None
    beyond: tuple[str, ...] = ()


def summarize_dataset(
    of: PreviewInputs, *, packs: int, shown: Sequence[PreviewRow] = (), progress: Progress | None = None
) -> DatasetSummary:
    """The whole data set as a run would have it, through the cache that the run will read.

    Args:
        packs: how many of the first ones to keep.
        shown: rows to compare with what the cache holds.

    Raises:
        DataError, ResourceError: what `prepare` and `StreamingDataset` raise, which is what stops a run.
    """
    data = of.data
    recipe: dict[str, Any] = {
        "stage": of.stage,
        "tokenizer_path": of.tokenizer_path,
        "chat_template": of.chat_template,
        "seed": of.seed,
        "date": of.date,
    }
    prepared = prepare(data, **recipe, progress=progress)
    if prepared.train is not None:
        laid = PackedDataset(prepared.train, data.packing, data.max_length, of.seed)
        train = SplitSummary(prepared.statistics, _lengths(prepared.train), _packed(laid, prepared.train, packs))
    else:
        with StreamingDataset(data, **recipe) as stream:
            train = _first_block(stream, data, packs)
    changed = tuple(_changed(prepared, shown, len(data.train)))
    held_out = _evaluation(prepared, of)
    beyond = _beyond(of, train, held_out)
    return DatasetSummary(train, held_out, data.streaming, changed, prepared.tokenizer, prepared.date, beyond)


def _beyond(of: PreviewInputs, *sides: SplitSummary | None) -> tuple[str, ...]:
    """Of a stream's samples only those of the first block are known, which says nothing of the others."""
    if of.positions is None:
        return ()
    lengths = np.concatenate([side.lengths for side in sides if side is not None])
    return tuple(beyond_positions(of.positions, of.data.max_length, None if of.data.streaming else lengths))


def summarize_refused(of: PreviewInputs, *, progress: Progress | None = None) -> DatasetSummary:
    """Counts over all rows whatever is wrong with them, for data that a run refuses. Nothing is cached.

    Of a stream as many rows of each source as a block has.

    Raises:
        DataError: a source or the tokenizer cannot be used at all.
    """
    most = of.data.shuffle_buffer if of.data.streaming else None
    done = 0

    def side(sources: Sequence[Source], most: int | None) -> SplitSummary:
        nonlocal done
        statistics, lengths = Statistics(), [np.empty(0, np.int32)]
        for source in sources:
            format, raw = read(source, of.data, of.stage)
            for part in tokenise_rows(islice(raw, most), TokenizeSettings.of(of.data, format), workers):
                statistics.add(part.statistics)
                lengths.append(part.block.lengths)
                done += part.statistics.rows
                if progress is not None:
                    progress(done, None)
        return SplitSummary(statistics, np.concatenate(lengths), None)

    with WorkerPool(
        TokenizeJob(of.tokenizer_path, of.chat_template, of.template_date), worker_count(of.data)
    ) as workers:
        train = side(of.data.train, most)
        own_eval = side(of.data.eval, None) if isinstance(of.data.eval, list) else None
    beyond = _beyond(of, train, own_eval)
    return DatasetSummary(train, own_eval, block=of.data.streaming, date=of.template_date, beyond=beyond)


def _lengths(selection: Selection) -> np.ndarray:
    """Of every sample of its stores, chosen or not: [samples] int32."""
    return np.concatenate([store.lengths for store in selection.stores])


def _packed(packs: PackedDataset, samples: Samples, first: int) -> PackingSummary:
    count = packs.packs_per_epoch
    kept = tuple(packs.at(number) for number in range(min(first, count)))
    return PackingSummary(count, len(samples), packs.tokens_per_epoch, packs.efficiency, kept)


def _first_block(stream: StreamingDataset, data: Data, first: int) -> SplitSummary:
    kept: list[Pack] = []
    documents: list[int] = []
    packs = tokens = 0
    while not packs or tokens < stream.statistics.tokens:  # every token of a block is in one of its packs
        pack = stream.at(packs)
        packs += 1
        tokens += pack.tokens
        documents += [len(sample.tokens) for sample in pack.samples]
        if len(kept) < first:
            kept.append(pack)
    # Joined documents are cut by the packs, so their pieces are what is known of them.
    lengths = np.array(documents, np.int32)
    samples = len(documents) if data.packing.kind == "concatenate" else stream.statistics.samples
    packed = PackingSummary(packs, samples, tokens, tokens / (packs * data.max_length), tuple(kept))
    return SplitSummary(stream.statistics, lengths, packed)


def _evaluation(prepared: PreparedData, of: PreviewInputs) -> SplitSummary | None:
    held_out = prepared.eval
    if held_out is None:
        return None
    packs = PackedDataset(held_out, of.data.packing, of.data.max_length, of.seed, shuffle=False)
    statistics = prepared.eval_statistics or _count(held_out)
    return SplitSummary(statistics, held_out.lengths, _packed(packs, held_out, 0))


def _count(samples: Selection) -> Statistics:
    """Rows that were set aside from those of training."""
    rows = np.stack([samples.store_numbers.astype(np.int64), samples.row_numbers])
    lengths = samples.lengths
    statistics = Statistics(
        rows=np.unique(rows, axis=1).shape[1],
        samples=len(samples),
        tokens=int(lengths.sum(dtype=np.int64)),
        longest=int(lengths.max(initial=0)),
    )
    counts = np.zeros(256, np.int64)
    for number, sample in enumerate(samples):
        statistics.trained_tokens += int(np.count_nonzero(sample.weights))
        counts += np.bincount(samples.reasons(number), minlength=256)
    statistics.reasons.update({reason.name.lower(): int(counts[reason]) for reason in Reason if counts[reason]})
    return statistics


def _changed(prepared: PreparedData, shown: Sequence[PreviewRow], train_sources: int) -> Iterator[str]:
    """Rows whose stored samples differ from those shown."""
    train = prepared.train.stores if prepared.train is not None else (None,) * train_sources
    own_eval = prepared.eval.stores if prepared.eval is not None and prepared.eval_statistics is not None else ()
    stores = [*train, *own_eval]
    for row in shown:
        store = stores[row.source]
        if store is None or row.bad:
            continue
        kept = () if row.dropped else row.samples
        numbers = np.flatnonzero(store.row_numbers == row.index).tolist()
        if len(numbers) != len(kept) or not all(
            _is_stored(store, number, sample) for number, sample in zip(numbers, kept, strict=True)
        ):
            yield row.where


def _is_stored(store: Samples, number: int, shown: PreviewSample) -> bool:
    stored = store.sample(number)
    return (
        np.array_equal(stored.tokens, shown.tokens)
        and np.array_equal(stored.weights, shown.weights)
        and np.array_equal(store.reasons(number), shown.reasons)
    )
