"""The whole data that a recipe trains and evaluates on: counts over all rows, and the packs of an epoch.

`prepare` fills the token cache that a run will read, and rows that were shown are compared with those in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from danlu.core.types import Pack
from danlu.data.message_spans import Reason
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import DatasetSpec, PreparedData, Progress, prepare, read, tokenise_rows, worker_count
from danlu.data.preview import PreviewRow, PreviewSample
from danlu.data.samples import Samples, Selection
from danlu.data.statistics import Statistics, beyond_positions
from danlu.data.stream import StreamingDataset
from danlu.data.tokenizer_info import TokenizerInfo
from danlu.data.worker_pool import WorkerPool
from danlu.recipe.sections import Data, Source


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
    """The data of training, or of evaluation.

    Attributes:
        statistics: those of the rows as they are read; held-out ones are among those of training.
        lengths: [samples] int32, the number of tokens of each.
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
        changed: rows that the cache, and so a run, holds in another form than they are rendered in now.
        tokenizer: None for a stream.
        date: the date that the chat template writes, where it writes one. beyond: warnings about samples longer than
            the model has positions for.
    """

    train: SplitSummary
    eval: SplitSummary | None
    block: bool
    changed: tuple[str, ...] = ()
    tokenizer: TokenizerInfo | None = None
    date: str | None = None
    beyond: tuple[str, ...] = ()


def summarize_dataset(
    spec: DatasetSpec,
    *,
    packs: int,
    positions: int | None = None,
    shown: Sequence[PreviewRow] = (),
    progress: Progress | None = None,
) -> DatasetSummary:
    """Summarizes the whole data set as a run would have it, through the cache that the run will read.

    Args:
        packs: how many of the first ones to keep.
        positions: the most tokens of a sample that the model has positions for; None where that is not known.
        shown: rows to compare with what the cache holds.

    Raises:
        DataError, ResourceError: as `prepare` and `StreamingDataset` raise them, which stops a run.
    """
    data = spec.data
    prepared = prepare(spec, progress=progress)
    if prepared.train is not None:
        packed = spec.packed(spec.samples(prepared.train))
        lengths = np.concatenate([store.lengths for store in prepared.train.stores])  # of all samples, chosen or not
        train = SplitSummary(prepared.statistics, lengths, _packing_summary(packed, prepared.train, packs))
    else:
        with StreamingDataset(spec) as stream:
            train = _first_block(stream, data, packs)
    changed = tuple(_changed(prepared, shown, len(data.train)))
    held_out = None
    if prepared.eval is not None:
        packed = spec.packed(spec.samples(prepared.eval), shuffle=False)
        statistics = prepared.eval_statistics or _count_held_out(prepared.eval)
        held_out = SplitSummary(statistics, prepared.eval.lengths, _packing_summary(packed, prepared.eval, 0))
    beyond = _beyond_positions(spec, positions, train, held_out)
    return DatasetSummary(train, held_out, data.streaming, changed, prepared.tokenizer, prepared.date, beyond)


def _beyond_positions(spec: DatasetSpec, positions: int | None, *splits: SplitSummary | None) -> tuple[str, ...]:
    """Returns warnings about samples longer than the model has positions for.

    Lengths are not used for a stream: only its first block is known, which says nothing of the rest.
    """
    if positions is None:
        return ()
    lengths = np.concatenate([split.lengths for split in splits if split is not None])
    return tuple(beyond_positions(positions, spec.data.max_length, None if spec.data.streaming else lengths))


def summarize_refused(
    spec: DatasetSpec, *, positions: int | None = None, progress: Progress | None = None
) -> DatasetSummary:
    """Counts over all rows whatever is wrong with them, for data that a run refuses. Nothing is cached.

    Of a stream as many rows of each source as a block has.

    Raises:
        DataError: a source or the tokenizer cannot be used at all.
    """
    rows_per_source = spec.data.shuffle_buffer if spec.data.streaming else None
    rows_done = 0

    def summarize(sources: Sequence[Source], rows_per_source: int | None) -> SplitSummary:
        nonlocal rows_done
        statistics, lengths = Statistics(), [np.empty(0, np.int32)]
        for source in sources:
            format, raw = read(source, spec)
            for chunk in tokenise_rows(islice(raw, rows_per_source), spec.settings(format), workers):
                statistics.add(chunk.statistics)
                lengths.append(chunk.block.lengths)
                rows_done += chunk.statistics.rows
                if progress is not None:
                    progress(rows_done, None)
        return SplitSummary(statistics, np.concatenate(lengths), None)

    job = spec.job()
    with WorkerPool(job, worker_count(spec.data)) as workers:
        train = summarize(spec.data.train, rows_per_source)
        evaluation = summarize(spec.eval_sources, None) if spec.eval_sources else None
    beyond = _beyond_positions(spec, positions, train, evaluation)
    return DatasetSummary(train, evaluation, block=spec.data.streaming, date=job.date, beyond=beyond)


def _packing_summary(packs: PackedDataset, samples: Samples, first: int) -> PackingSummary:
    count = packs.packs_per_epoch
    kept = tuple(packs.at(number) for number in range(min(first, count)))
    return PackingSummary(count, len(samples), packs.tokens_per_epoch, packs.efficiency, kept)


def _first_block(stream: StreamingDataset, data: Data, first: int) -> SplitSummary:
    kept: list[Pack] = []
    document_lengths: list[int] = []
    packs = tokens = 0
    while not packs or tokens < stream.statistics.tokens:  # every token of a block is in one of its packs
        pack = stream.at(packs)
        packs += 1
        tokens += pack.tokens
        document_lengths += [len(sample.tokens) for sample in pack.samples]
        if len(kept) < first:
            kept.append(pack)
    # Joined documents are cut by the packs, so only their segments are known.
    lengths = np.array(document_lengths, np.int32)
    samples = len(document_lengths) if data.packing.kind == "concatenate" else stream.statistics.samples
    packed = PackingSummary(packs, samples, tokens, tokens / (packs * data.max_length), tuple(kept))
    return SplitSummary(stream.statistics, lengths, packed)


def _count_held_out(samples: Selection) -> Statistics:
    """Counts over rows that were set aside from those of training."""
    rows = np.stack([samples.store_numbers.astype(np.int64), samples.row_numbers])
    lengths = samples.lengths
    statistics = Statistics(
        rows=np.unique(rows, axis=1).shape[1],
        samples=len(samples),
        tokens=int(lengths.sum(dtype=np.int64)),
        longest=int(lengths.max(initial=0)),
    )
    tokens_by_reason = np.zeros(256, np.int64)
    for number, sample in enumerate(samples):
        statistics.trained_tokens += int(np.count_nonzero(sample.weights))
        tokens_by_reason += np.bincount(samples.reasons(number), minlength=256)
    counts = {reason.name.lower(): int(tokens_by_reason[reason]) for reason in Reason}
    statistics.reasons += Counter(counts)  # which leaves out those that are 0
    return statistics


def _changed(prepared: PreparedData, shown: Sequence[PreviewRow], train_sources: int) -> Iterator[str]:
    """Yields the places of rows with stored samples that differ from those shown."""
    train = prepared.train.stores if prepared.train is not None else (None,) * train_sources
    evaluation = prepared.eval.stores if prepared.eval is not None and prepared.eval_statistics is not None else ()
    stores = [*train, *evaluation]
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
        and stored.branches == tuple(branch[1:] for branch in shown.branches)
    )
