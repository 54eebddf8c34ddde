"""Rows of text as the items of a run: packs of tokens, stored or streamed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from danlu.assembly.recipe_adapters import dataset_spec, max_sample_length, model_folder, tokenizer_path
from danlu.core.errors import DataError
from danlu.core.types import Pack
from danlu.data.packed_dataset import PackedDataset
from danlu.data.permutation import key
from danlu.data.prepare import DatasetSpec, PreparedData, prepare
from danlu.data.samples import Samples
from danlu.data.sources import reported_sources
from danlu.data.statistics import Statistics, beyond_positions
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tokenizer_folder import template_date
from danlu.models.config import ModelConfig
from danlu.recipe import Recipe
from danlu.recipe.sections import Data, LengthStage
from danlu.recipe.staged_lengths import amount_per_step
from danlu.stages.protocols import StageData, StoredRows
from danlu.training.data_loader import Stretch
from danlu.training.progress import RowProgress

if TYPE_CHECKING:
    from danlu.inference.chat_tokenizer import ChatTokenizer


class PackReader:
    """A `Reader`: tokenised rows, packed."""

    items = "packed sequences"
    counted = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def read(self, stream: TextIO) -> StageData:
        """Reads the rows. The first process tokenises; the others read the cache."""
        section = self.recipe.long_context
        if section is not None and section.stages:
            return staged_material(self.recipe, section.stages, stream)
        spec = dataset_spec(self.recipe)
        prepared = prepared_data(spec, stream)
        if prepared.train is not None:
            return self._stored(prepared, prepared.train, prepared.eval)
        from danlu.data.stream import StreamingDataset

        rows = StreamingDataset(spec)

        def late_lines() -> list[str]:
            return row_lines("data, as far as it was read", rows.statistics)

        held_out = held_out_packs(self.recipe.data, self.recipe.seed, prepared.eval)
        lines, sources = prepared_lines(self.recipe, prepared), reported_sources(self.recipe.data)
        return StageData(rows, None, held_out, lines, late_lines, rows.close, prepared.tokenizer, sources)

    def _stored(self, prepared: PreparedData, train: Samples, held_out: Samples | None) -> StageData:
        """The material of rows that were tokenised before training, of these samples of theirs."""
        recipe = self.recipe
        packs = PackedDataset(train, recipe.data.packing, recipe.data.max_length, recipe.seed)
        check_targets(map(packs.at, range(packs.packs_per_epoch)), "data.train", "train on")
        return StageData(
            packs,
            packs.packs_per_epoch,
            held_out_packs(recipe.data, recipe.seed, held_out),
            prepared_lines(recipe, prepared),
            tokenizer=prepared.tokenizer,
            sources=reported_sources(recipe.data),
            stored=StoredRows(train, held_out, partial(self._stored, prepared)),
        )

    def amount(self, items: int) -> str:
        """The number of packs, as text."""
        data = self.recipe.data
        return f"{items} x {data.max_length} tokens" if data.packing.kind != "none" else f"{items} rows"

    def targets(self, items: int) -> int:
        """The most targets that `items` packs have."""
        return items * self.recipe.data.max_length


def prepared_lines(recipe: Recipe, prepared: PreparedData) -> list[str]:
    """Lines for the console on the fate of the rows, and on samples that are longer than the model has positions
    for."""
    return data_lines(prepared) + _beyond_positions(recipe, prepared)


def _beyond_positions(recipe: Recipe, prepared: PreparedData) -> list[str]:
    sides = [side for side in (prepared.train, prepared.eval) if side is not None]
    lengths = None if prepared.train is None else np.concatenate([side.lengths for side in sides])
    longest = recipe.data.max_length
    positions = max_sample_length(recipe.model, recipe.adapter, recipe.long_context, longest)
    return beyond_positions(positions, longest, lengths)


def prepared_data(spec: DatasetSpec, stream: TextIO, held_out_rows: Sequence[np.ndarray] | None = None) -> PreparedData:
    """The rows as tokens, with the progress shown on `stream`; held_out_rows: as in `prepare`."""
    with closing(RowProgress(stream)) as progress:
        return prepare(spec, progress=progress, held_out_rows=held_out_rows)


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The recipe's tokenizer with its chat template. Raises DataError if it cannot be read."""
    model = recipe.model
    return load_tokenizer(
        tokenizer_path(recipe.model), model.chat_template, model.chat_template_date, model.chat_template_kwargs
    )


def chat_tokenizer_of(recipe: Recipe, config: ModelConfig) -> ChatTokenizer:
    """The recipe's tokenizer for answers of its policy, with all tokens that end one (see `end_tokens`).

    config: the policy's. Raises DataError if the tokenizer cannot be read, ModelError for a broken generation config.
    """
    from danlu.inference.chat_tokenizer import ChatTokenizer
    from danlu.inference.generation_config import end_tokens

    tokenizer = tokenizer_of(recipe)
    folders = [
        Path(tokenizer_path(recipe.model)),
        *([] if recipe.model.path is None else [model_folder(recipe.model)]),
    ]
    return ChatTokenizer(tokenizer, end_tokens(tokenizer, config, *folders))


def written_date(recipe: Recipe) -> str | None:
    """The day that the chat template writes in this run: the recipe's, else today's; None where it writes none."""
    if recipe.stage in ("classify", "pretrain"):
        return None
    return template_date(tokenizer_path(recipe.model), recipe.model.chat_template, recipe.model.chat_template_date)


def staged_material(recipe: Recipe, stages: Sequence[LengthStage], stream: TextIO) -> StageData:
    """The material of rows packed at the length of each stage, and held-out ones at the longest.

    Rows are held out once, by the samples of the longest stage, so that none is trained in another.
    """
    from danlu.data.packed_dataset import StagedPacks

    prepared: dict[int, PreparedData] = {}
    held_out_rows = None
    for length in sorted({stage.length for stage in stages}, reverse=True):
        of_length = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": length})})
        prepared[length] = prepared_data(dataset_spec(of_length), stream, held_out_rows)
        held_out_rows = prepared[length].held_out_rows
    lines: list[str] = []
    for length in sorted(prepared):
        of_length = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": length})})
        lines += [f"at {length:,} tokens: {line}" for line in prepared_lines(of_length, prepared[length])]
    packs = []
    for number, stage in enumerate(stages):
        train = prepared[stage.length].train
        assert train is not None, "the recipe's rules refuse streaming"
        # Numbered: a stage of the same length as the one before has an order of its own.
        order = key(recipe.seed, "long_context", number)
        packs.append(PackedDataset(train, recipe.data.packing, stage.length, order))
        check_targets(map(packs[-1].at, range(packs[-1].packs_per_epoch)), "data.train", "train on")
    longest = prepared[max(prepared)]
    return StageData(
        StagedPacks(packs, [stage.length for stage in stages]),
        None,
        held_out_packs(recipe.data, recipe.seed, longest.eval),
        lines,
        tokenizer=longest.tokenizer,
        sources=reported_sources(recipe.data),
        stretches=_stretches(recipe, stages),
    )


def _stretches(recipe: Recipe, stages: Sequence[LengthStage]) -> list[Stretch]:
    from danlu.data.packed_dataset import STAGE_ITEMS

    stretches, first_step = list[Stretch](), 1
    for number, stage in enumerate(stages):
        metrics = {"stage": number + 1, "max_length": stage.length}
        per_step, amount = recipe.batch.packs(stage.length), amount_per_step(recipe, stage)
        stretches.append(Stretch(first_step, number * STAGE_ITEMS, per_step, metrics, amount))
        first_step += stage.steps
    return stretches


def held_out_packs(data: Data, seed: int, samples: Samples | None) -> list[Pack] | None:
    """Held-out samples, packed in their own order; None where there are none. Raises DataError without targets."""
    if samples is None:
        return None
    packs = PackedDataset(samples, data.packing, data.max_length, seed, shuffle=False)
    held_out = [packs.at(number) for number in range(packs.packs_per_epoch)]
    check_targets(held_out, "data.eval", "evaluate on")
    return held_out


def check_targets(packs: Iterable[Pack], key: str, use: str) -> None:
    """Refuse packs that all lack a target: the first token of a pack never is one, whatever its weight.

    Raises DataError.
    """
    if not any(sample.weights.any() for pack in packs for sample in pack.samples):
        raise DataError(
            f"{key}: cut into packed sequences, its rows have no trained token to {use}. Raise data.max_length, or "
            "look at the rows' own labels and weights with `danlu preview`"
        )


def data_lines(prepared: PreparedData) -> list[str]:
    """Lines for the console on the fate of the rows: everything that is cut, dropped or skipped is reported."""
    lines = [*prepared.column_lines, *row_lines("data", prepared.statistics)]
    if prepared.eval_statistics is not None:
        lines += row_lines("evaluation data", prepared.eval_statistics)
    elif prepared.train is not None and prepared.eval is not None:
        lines.append(f"evaluation data: {len(prepared.eval):,} samples of these rows are held out")
    if prepared.tokenizer is not None and prepared.tokenizer.warning:
        lines.append(prepared.tokenizer.warning)
    return lines


def row_lines(name: str, statistics: Statistics) -> list[str]:
    """Lines for the console on the rows of one side of the data; none for a stream that was not read yet."""
    if not statistics.rows:
        return []
    rows, tokens, share = statistics.rows, statistics.tokens, statistics.trained_share
    lines = [f"{name}: {rows:,} rows, {tokens:,} tokens, {share:.0%} of them trained"]
    if statistics.shortened:
        what = ", ".join(f"{count:,} {done}" for done, count in statistics.shortened.items())
        lost = f"{statistics.lost_tokens:,} tokens are left out"
        total = statistics.shortened.total()
        lines.append(f"{name}: {total:,} rows are longer than data.max_length: {what}; {lost}")
    remarks = (*statistics.cut_lines(), *statistics.template_lines(), *statistics.unread_lines())
    return lines + statistics.outcome_lines(name, remarks)
