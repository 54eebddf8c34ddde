"""Turning the data section of a recipe into tokenised samples, through the cache, or into the prompts of stage `rl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from danlu.core.errors import DataError
from danlu.core.machine import usable_cores
from danlu.data import mixture, sources
from danlu.data.packed_dataset import PackedDataset, rows_in_order
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.rows import Format, detect_format, refuse_judged_answers
from danlu.data.samples import Samples, Selection
from danlu.data.sources import column_lines, source_names
from danlu.data.statistics import Statistics
from danlu.data.store_names import store_name
from danlu.data.token_cache import StoreWriter, TokenCache, TokenStore
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizer_folder import template_date
from danlu.data.tokenizer_info import TokenizerInfo
from danlu.data.tokenizing import TokenizedChunk, TokenizerJob, TokenizeSettings, chunks, tokenise
from danlu.data.worker_pool import WorkerPool
from danlu.recipe.sections import Data, Packing, Source
from danlu.recipe.sections.base import RowType

if TYPE_CHECKING:
    from danlu.data.prompts import Prompt, PromptSets, PromptSettings
    from danlu.data.tree_runs import TreeRuns

Stage = Literal["pretrain", "sft", "preference", "reward", "distill", "rl"]
Progress = Callable[[int, int | None], None]
"""Called with the rows done so far and, where known, their number."""


class Chunk(Protocol):
    """The outcome of a chunk of rows, from a worker process."""

    @property
    def statistics(self) -> Statistics: ...

    @property
    def bad(self) -> tuple[str, ...]: ...  # a message for each row that cannot be used, in the order of the rows


AnyChunk = TypeVar("AnyChunk", bound=Chunk)


@dataclass(frozen=True)
class DatasetSpec:
    """Everything that decides which tokens a run trains on or answers, and in which order.

    Attributes:
        tokenizer_path: a folder, a finished run, or a hub id.
        chat_template: a Jinja file, or the name of one that comes with danlu, in the place of the tokenizer's own.
        seed: the seed of the order, the held-out rows and the mixture. date: the day that a chat template writes if it
            asks for one, such as 2026-11-22; None for today.
        row_type: the type of rows with compared or judged answers, which become trees; None in other stages.
        needs_mismatched: each tree has one more branch, its prompt with the answer of the next row.
        template_kwargs: further variables of the chat template.
        max_new_tokens: the most tokens of an answer, for which data.max_length has room behind each prompt of stage rl.
        tools: tools that the chat template describes in each prompt of stage rl.
        in_turns: answers of stage rl have several turns, with an environment.
        section: the section of the recipe that has the keys of `data`, for messages.
    """

    data: Data
    stage: Stage
    tokenizer_path: str
    chat_template: str | None
    seed: int
    date: str | None = None
    row_type: RowType | None = None
    needs_mismatched: bool = False
    max_new_tokens: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    in_turns: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    section: str = "data"

    @property
    def eval_sources(self) -> list[Source]:
        """The sources of `data.eval`; none where it is a share or a number of the training rows."""
        return self.data.eval if isinstance(self.data.eval, list) else []

    @property
    def sources(self) -> list[Source]:
        """The sources of `data.train`, then those of `data.eval`."""
        return [*self.data.train, *self.eval_sources]

    @property
    def template_date(self) -> str | None:
        """The day that the chat template writes; None where it asks for none, and in pretraining, which uses none.

        Raises:
            DataError: there is no tokenizer, or the Jinja file is missing.
        """
        if self.stage == "pretrain":
            return None
        return template_date(self.tokenizer_path, self.chat_template, self.date)

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt of stage rl may have."""
        return self.data.max_length - self.max_new_tokens

    def settings(self, format: Format | Literal["auto"]) -> TokenizeSettings | PromptSettings:
        """How the rows of a source become tokens."""
        data = self.data
        if self.stage != "rl":
            return TokenizeSettings.of(data, format, self.row_type)
        from danlu.data.prompts import PromptSettings

        return PromptSettings(
            data.prompt, format, data.system, self.longest_prompt, data.overlong, self.tools, self.in_turns
        )

    def samples(self, chosen: Samples) -> Samples:
        """The chosen samples with the branches that the objective needs besides.

        Raises:
            DataError: there are too few of them.
        """
        if not self.needs_mismatched:
            return chosen
        from danlu.data.mismatched import MismatchedAnswers

        return MismatchedAnswers(chosen, self.data.max_length)

    def packed(self, samples: Samples, *, shuffle: bool = True) -> PackedDataset:
        """The samples as packs; a tree is one by itself.

        Raises:
            DataError: there are no samples, or one is longer than a pack.
        """
        if self.row_type is None:
            return PackedDataset(samples, self.data.packing, self.data.max_length, self.seed, shuffle=shuffle)
        # max_length bounds a path: a prompt with one of two answers.
        capacity = 2 * self.data.max_length
        return PackedDataset(samples, Packing(kind="none"), capacity, self.seed, shuffle=shuffle)

    def job(self, work: Callable[[Tokenizer, Any], Any] = tokenise) -> TokenizerJob:
        """The job of worker processes that call `work` with the tokenizer of these rows."""
        return TokenizerJob(self.tokenizer_path, self.chat_template, self.template_date, work, self.template_kwargs)


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data, read from disk as it is needed."""

    train: Selection | None  # None when streaming: `danlu.data.stream.StreamingDataset` reads the rows while training
    eval: Selection | None
    statistics: Statistics  # of the training rows, before evaluation rows were taken out and sources mixed
    eval_statistics: Statistics | None  # of evaluation sources of their own
    tokenizer: TokenizerInfo | None  # None when nothing was tokenised: streaming without evaluation
    max_token: int  # the largest token id anywhere
    date: str | None = None  # that the chat template writes, where it writes one
    column_lines: tuple[str, ...] = ()  # for the console, on columns that a dataset_info.json names
    held_out_rows: tuple[np.ndarray, ...] = ()
    """The numbers of the rows that `data.eval` holds out of each source of `data.train`; empty where there are none."""


def prepare_prompts(spec: DatasetSpec, *, progress: Progress | None = None) -> PromptSets:
    """The prompts of the rows of stage `rl`, those that are held out apart.

    Rows are read, skipped and held out as by `prepare`, so that a row which is usable in each of two stages of a chain
    is held out in both. Nothing is cached: a prompt is short, and its row is needed too.

    Raises:
        DataError: a file, row, template or tokenizer is wrong, or a source has no prompt.
    """
    from danlu.data.prompts import PromptChunk, PromptSets, no_prompt_left, render_prompts

    data, rows = spec.data, _CheckedRows(spec, progress)

    def read_all(sources: Sequence[Source]) -> tuple[list[list[Prompt]], Statistics]:
        total = Statistics()
        prompts: list[list[Prompt]] = []
        for source in sources:
            statistics = Statistics()
            of_source: list[Prompt] = []
            for chunk in rows.chunks(source, workers):
                statistics.add(chunk.statistics)
                of_source += chunk.prompts
            if not of_source:
                raise DataError(f"{source.path}: {no_prompt_left(statistics, data.max_length, spec.max_new_tokens)}")
            prompts.append(of_source)
            total.add(statistics)
        return prompts, total

    workers: WorkerPool[Any, PromptChunk]
    with WorkerPool(spec.job(render_prompts), worker_count(data)) as workers:
        evaluation, eval_statistics = read_all(spec.eval_sources)
        train, statistics = read_all(data.train)
    chosen, held_out = draw_rows([np.arange(len(prompts)) for prompts in train], data, spec.seed)

    def take(numbers: Sequence[np.ndarray]) -> tuple[Prompt, ...]:
        return tuple(prompts[number] for prompts, own in zip(train, numbers, strict=True) for number in own.tolist())

    lines = tuple(column_lines(spec.sources, data.columns))
    if spec.eval_sources:
        return PromptSets(take(chosen), tuple(chain(*evaluation)), statistics, eval_statistics, lines)
    return PromptSets(take(chosen), take(held_out) if held_out is not None else (), statistics, None, lines)


def prepare(
    spec: DatasetSpec,
    *,
    progress: Progress | None = None,
    require_ends: bool = True,
    held_out_rows: Sequence[np.ndarray] | None = None,
) -> PreparedData:
    """Tokenises rows that are not in the cache yet, checks them, and chooses each epoch's samples.

    Neither a tokenizer library nor the rows are loaded into this process: rows are tokenised in processes of their own,
    and on a cache hit not at all.

    Args:
        require_ends: refuse answers of which none trains the token that ends it; no fault where nothing is trained.
        held_out_rows: the rows held out of each source of `data.train`, drawn already: for the same rows at
            another length. By default a share or number in `data.eval` draws them.

    Raises:
        DataError: a file, row, tokenizer or template is wrong; or nothing would be trained.
        ResourceError: the cache cannot be written.
    """
    data, job = spec.data, spec.job()
    cached = _CachedSources(spec, job.tokenizer_fingerprint(), progress)
    with WorkerPool(job, worker_count(data)) as workers:
        eval_stores = [cached.store(source, workers) for source in spec.eval_sources]
        train_stores = [] if data.streaming else [cached.store(source, workers) for source in data.train]
    train_statistics, eval_statistics = (
        Statistics.sum_of(Statistics.from_json(store.statistics["statistics"]) for store in stores)
        for stores in (train_stores, eval_stores)
    )
    for stores, statistics, used in (
        (train_stores, train_statistics, data.train),
        (eval_stores, eval_statistics, spec.eval_sources),
    ):
        if stores:
            check_trained(statistics, ", ".join(source.path for source in used), require_ends=require_ends)
    for source, store in zip(spec.eval_sources, eval_stores, strict=True):
        if not len(store):
            raise DataError(f"{source.path}: no row is left to evaluate on: every one was skipped or dropped")
    # One label may be enough for the evaluation.
    if (problem := train_statistics.judgement_problem(", ".join(source.path for source in data.train))) is not None:
        raise DataError(problem)
    train, held_out, held_out_rows = None, None, tuple(held_out_rows or ())
    if train_stores:
        train, held_out, held_out_rows = _choose(train_stores, data, spec.seed, held_out_rows)
    eval_selection = Selection.all_of(eval_stores, source_names(spec.eval_sources)) if eval_stores else held_out
    stores = [*train_stores, *eval_stores]
    return PreparedData(
        train=train,
        eval=eval_selection,
        statistics=train_statistics,
        eval_statistics=eval_statistics if eval_stores else None,
        tokenizer=TokenizerInfo(**stores[0].statistics["tokenizer"]) if stores else None,
        max_token=max((store.max_token for store in stores), default=-1),
        date=job.date,
        column_lines=tuple(column_lines(spec.sources, data.columns)),
        held_out_rows=held_out_rows,
    )


def cached_lengths(spec: DatasetSpec) -> np.ndarray | None:
    """[samples] int: tokens of each sample of an epoch; None where the cache lacks some of the rows.

    Nothing is tokenised, and hub data sets and streams are not asked for. Raises DataError for a missing file.
    """
    chosen = _cached(spec)
    return None if chosen is None else spec.samples(chosen).lengths


def cached_runs(spec: DatasetSpec, longest_shared: int | None) -> TreeRuns | None:
    """The runs of rows with compared or judged answers, in the order of the first epoch, as a step lays them out.

    longest_shared: as `tree_runs` has it. None, and errors, as `cached_lengths`.
    """
    if (chosen := _cached(spec)) is None:
        return None
    from danlu.data.tree_runs import tree_runs

    order = rows_in_order(len(chosen), spec.seed)
    mismatched_to = spec.data.max_length if spec.needs_mismatched else None
    runs = tree_runs(chosen, mismatched_to=mismatched_to, longest_shared=longest_shared)
    return None if runs is None else runs.taken(order)


def _cached(spec: DatasetSpec) -> Selection | None:
    """The samples of an epoch; None where the cache lacks some of the rows."""
    if spec.data.streaming:
        return None
    cached = _CachedSources(spec, spec.job().tokenizer_fingerprint(), None)
    stores = []
    for source in spec.data.train:
        if (store := cached.find(source)) is None:
            return None
        stores.append(store)
    return _choose(stores, spec.data, spec.seed, ())[0]


def worker_count(data: Data) -> int:
    """Tokenising processes: `data.workers`, or one for each core this process may use."""
    return usable_cores() if data.workers == "auto" else data.workers


def check_trained(statistics: Statistics, where: str, *, require_ends: bool = True) -> None:
    """Refuse data that would train nothing, or answers that never end.

    Some answers without an end are no error, truncation makes them; `danlu preview` counts them.

    Raises:
        DataError: no row, no sample, no trained token, or answers of which none trains the token that ends it.
    """
    if not statistics.rows:
        raise DataError(f"{where}: no rows")
    if statistics.bad_rows == statistics.rows:
        raise DataError(f"{where}: none of {statistics.rows} rows can be used; the first: {statistics.bad_examples[0]}")
    if not statistics.samples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in statistics.dropped.items())
        raise DataError(
            f"{where}: no row is left to train on, of {statistics.rows} ({reasons}). "
            "Check data.train_on, data.max_length, data.overlong and the rows' own train and weight fields; "
            "`danlu preview` shows the reason of every token"
        )
    if not statistics.trained_tokens:
        reasons = ", ".join(f"{count} {reason}" for reason, count in statistics.reasons.most_common())
        raise DataError(
            f"{where}: none of {statistics.tokens} tokens would be trained ({reasons}). Check data.train_on, "
            "data.max_length and the rows' own train and weight fields; `danlu preview` shows the reason of every token"
        )
    if require_ends and statistics.answers and statistics.endless_answers == statistics.answers:
        rows = statistics.shortened.total()
        longer = f"{rows:,} {'row is' if rows == 1 else 'rows are'} longer than data.max_length: raise it first. "
        raise DataError(f"{longer if rows else ''}{statistics.endless_example}")


class BadRowPolicy:
    """Applies data.on_bad_row and data.bad_row_limit to bad rows, which come in the order of the rows.

    section: as in `DatasetSpec`.
    """

    def __init__(self, data: Data, section: str = "data") -> None:
        self._section = section
        self._stop = data.on_bad_row == "error"
        self._limit = data.bad_row_limit
        self._bad_rows = 0
        self._good_rows = 0

    def check(self, messages: Sequence[str], rows: int) -> None:
        """Counts the bad ones among the next `rows` rows. `messages`: the error of each of them.

        Raises:
            DataError: bad rows are errors, or there are too many.
        """
        self._good_rows += rows - len(messages)
        for message in messages:
            if self._stop and self._good_rows:
                raise DataError(f"{message}\nSet {self._section}.on_bad_row: skip to leave such rows out")
            if self._stop:  # to leave out such rows would leave nothing
                which = "the only row" if rows == 1 else f"all of the first {rows} rows"
                raise DataError(f"{message}\nSo is {which}: mend them, or give rows of a known format")
            self._bad_rows += 1
            if self._bad_rows > self._limit:
                raise DataError(
                    f"more than {self._limit} bad rows ({self._section}.bad_row_limit); the last one: {message}"
                )


class _CheckedRows:
    """Reads sources in chunks; bad rows are refused as the data section says, and the progress is shown."""

    def __init__(self, spec: DatasetSpec, progress: Progress | None) -> None:
        self._spec = spec
        self._progress = progress or (lambda done, total: None)
        self._rows_done = 0

    def chunks(self, source: Source, workers: WorkerPool[Any, AnyChunk]) -> Iterator[AnyChunk]:
        """The chunks of a source, in the order of the rows. Raises DataError as `read` and `BadRowPolicy` do."""
        bad_rows = BadRowPolicy(self._spec.data, self._spec.section)
        format, raw = read(source, self._spec)
        for chunk in tokenise_rows(raw, self._spec.settings(format), workers):
            bad_rows.check(chunk.bad, chunk.statistics.rows)
            yield chunk
            self._rows_done += chunk.statistics.rows
            self._progress(self._rows_done, None)


class _CachedSources:
    """The token stores of sources; a source that the cache does not have is tokenised."""

    def __init__(self, spec: DatasetSpec, tokenizer: str, progress: Progress | None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer  # fingerprint
        self._cache = TokenCache(Path(spec.data.cache).expanduser())
        self._rows = _CheckedRows(spec, progress)

    def find(self, source: Source) -> TokenStore | None:
        """The tokens of a source, if the cache has them; of files alone."""
        if sources.source_files(source) is None:
            return None
        return self._cache.find(store_name(source), partial(self._parts, source))

    def _parts(self, source: Source) -> dict[str, Any]:
        """Everything that the tokens of a source depend on."""
        parts: dict[str, Any] = {
            "source": sources.fingerprint(source, self._cache.folder / "files"),
            "tokenizer": self._tokenizer,
            "settings": asdict(self._spec.settings(source.format)),
            # A store made while skipping bad rows must not serve a run that would have stopped at one.
            "bad_rows": [self._spec.data.on_bad_row, self._spec.data.bad_row_limit],
        }
        if mappings := sources.column_mappings(source, self._spec.data.columns):
            parts["columns"] = [mapping.key() for mapping in mappings]
        return parts

    def store(self, source: Source, workers: WorkerPool[Any, TokenizedChunk]) -> TokenStore:
        def build(open_writer: Callable[[int], StoreWriter]) -> None:
            statistics = Statistics()
            writer: StoreWriter | None = None
            for chunk in self._rows.chunks(source, workers):
                writer = writer or open_writer(chunk.tokenizer.vocab_size)
                writer.add(chunk.block)
                statistics.add(chunk.statistics)
            if writer is None:
                raise DataError(f"{source.path}: no rows")
            writer.finish({"statistics": statistics.to_json(), "tokenizer": asdict(chunk.tokenizer)})

        return self._cache.get(store_name(source), self._parts(source), build)


def read(source: Source, spec: DatasetSpec) -> tuple[Format | Literal["auto"], Iterator[RawRow]]:
    """The format of a source's rows, which its first good row decides but in stage rl, and the rows.

    Raises:
        DataError: the source cannot be read, or this stage or packing has no use for its rows.
    """
    data, rows = spec.data, sources.read_rows(source, spec.data.columns)
    if spec.stage == "rl":  # rows of several formats may lie together: of each the prompt alone is read
        return source.format, rows
    seen: list[RawRow] = []
    format: Format | Literal["auto"] = source.format
    for row in rows:
        seen.append(row)
        if isinstance(row.value, BadRow):
            continue
        try:
            row_format = detect_format(row.value, row.where) if format == "auto" else format
            if spec.row_type is None:
                refuse_judged_answers(row.value, row_format, row.where)
            else:
                from danlu.data.preference_rows import require_row_type

                require_row_type(row.value, row_format, spec.row_type, row.where)
            format = row_format
            break
        except DataError:  # one such row is a bad row; too many are a file of another kind
            if data.on_bad_row == "error" or len(seen) > data.bad_row_limit:
                raise
    plain = format in ("text", "tokenized", "auto")
    if spec.stage == "pretrain" and not plain:
        raise DataError(
            f"{source.path}: stage pretrain trains on plain text, but its rows are {format}: set stage: sft, "
            "or give rows with a text column"
        )
    if data.packing.kind == "concatenate" and not plain:
        raise DataError(
            f"data.packing: concatenate joins plain text, but the rows of {source.path} are {format}: use best-fit"
        )
    return format, chain(seen, rows)


def tokenise_rows(
    raw: Iterable[RawRow], settings: TokenizeSettings | PromptSettings, workers: WorkerPool[Any, AnyChunk]
) -> Iterator[AnyChunk]:
    """Rows as tokenised chunks, in order."""
    return workers.map((settings, chunk) for chunk in chunks(raw))


def _choose(
    stores: list[TokenStore], data: Data, seed: int, held_out_rows: tuple[np.ndarray, ...]
) -> tuple[Selection, Selection | None, tuple[np.ndarray, ...]]:
    """The samples of an epoch and the held-out ones, and the rows of these. All samples of a row are on the same side.

    held_out_rows: of each store, where they are drawn already.
    """
    usable = [np.unique(store.row_numbers) for store in stores]  # [rows] of each store that gave a sample
    for source, rows in zip(data.train, usable, strict=True):
        if not len(rows):
            raise DataError(f"{source.path}: no row is left to train on: every one was skipped or dropped")
    names = source_names(data.train)

    def select(numbers: Sequence[np.ndarray]) -> Selection:
        return Selection.some_of(stores, names, list(map(_samples_of, stores, numbers)))

    chosen, held_out = draw_rows(usable, data, seed, held_out_rows)
    if held_out is None:
        return select(chosen), None, held_out_rows
    return select(chosen), select(held_out), held_out_rows or tuple(held_out)


def draw_rows(
    usable: Sequence[np.ndarray], data: Data, seed: int, held_out_rows: Sequence[np.ndarray] = ()
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """The rows of an epoch and the held-out ones of each source; None for these where `data.eval` draws none.

    usable: the numbers of the rows of each source that can be used. held_out_rows: of each source, where they are drawn
    already.
    """
    held_out = None
    if data.eval is not None and not isinstance(data.eval, list):
        if held_out_rows:
            masks = [np.isin(rows, own_rows) for rows, own_rows in zip(usable, held_out_rows, strict=True)]
        else:
            masks = mixture.hold_out([len(rows) for rows in usable], data.eval, seed)
        held_out = [rows[mask] for rows, mask in zip(usable, masks, strict=True)]
        usable = [rows[~mask] for rows, mask in zip(usable, masks, strict=True)]
    positions = mixture.epoch_rows([len(rows) for rows in usable], [source.weight for source in data.train], seed)
    return [rows[at] for rows, at in zip(usable, positions, strict=True)], held_out


def _samples_of(store: TokenStore, row_numbers: np.ndarray) -> np.ndarray:
    """Numbers of the samples that rows [n] gave, row after row: [samples] int64."""
    starts = np.searchsorted(store.row_numbers, row_numbers, side="left")
    counts = np.searchsorted(store.row_numbers, row_numbers, side="right") - starts
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
