"""Rows with compared or judged answers as the items of a run: each is a tree of tokens, and a pack by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from danlu.assembly.recipe_adapters import dataset_spec, longest_shared_path
from danlu.core.types import Pack, Sample
from danlu.data.batch import empty_like
from danlu.data.mismatched import MISMATCHED, with_own_prompt
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import PreparedData
from danlu.data.samples import Samples
from danlu.data.sources import reported_sources
from danlu.data.statistics import unread_margins
from danlu.data.trees import longest_path, repeat_stem
from danlu.recipe import Recipe
from danlu.stages.data_remarks import balance_lines
from danlu.stages.protocols import StageData, StoredRows
from danlu.stages.reader import prepared_data, prepared_lines


class TreeReader:
    """A `Reader`: rows of stages preference and reward."""

    counted = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._spec = dataset_spec(recipe)

    @property
    def items(self) -> str:
        """The unit that a batch is counted in."""
        return "pairs" if self.recipe.row_type == "preference" else "rows"

    def read(self, stream: TextIO) -> StageData:
        """Reads the rows. The first process tokenises; the others read the cache."""
        prepared = prepared_data(self._spec, stream)
        assert prepared.train is not None, "the recipe's rules refuse streaming"
        held_out = None if prepared.eval is None else self._spec.samples(prepared.eval)
        return self._stage_data(prepared, self._spec.samples(prepared.train), held_out)

    def _stage_data(self, prepared: PreparedData, train: Samples, held_out: Samples | None) -> StageData:
        recipe, spec = self.recipe, self._spec
        longest_shared = longest_shared_path(recipe.data, recipe.model, recipe.adapter)
        rows = Trees(spec.packed(train), longest_shared)
        return StageData(
            rows,
            len(rows),
            None if held_out is None else Trees(spec.packed(held_out, shuffle=False), longest_shared).all(),
            [
                *prepared_lines(recipe, prepared),
                *(f"data: {line}" for line in unread_margins(prepared.statistics, recipe.answer_terms)),
                *self._stem_lines(train, longest_shared),
                *balance_lines(recipe, train),
            ],
            tokenizer=prepared.tokenizer,
            sources=reported_sources(recipe.data),
            empty=empty_like(train.sample(0)),
            stored=StoredRows(
                train, held_out, partial(self._stage_data, prepared), partial(laid_out, longest_shared=longest_shared)
            ),
        )

    def _stem_lines(self, samples: Samples, longest_shared: int | None) -> list[str]:
        if not self.recipe.data.share_stem:
            return ["data.share_stem: false: each answer has a copy of its prompt"]
        if longest_shared is None:
            return []
        longer = sum(longest_path(samples.sample(number)) > longest_shared for number in range(len(samples)))
        if not longer:
            return []
        return [
            f"{longer:,} rows are longer than max_position_embeddings ({longest_shared:,}): each of their answers has "
            "a copy of the prompt, for the model's rotary factors depend on the length"
        ]

    def amount(self, items: int) -> str:
        """The number of rows, as text."""
        return f"{items} {self.items}"

    def targets(self, items: int) -> int:
        """The most targets that `items` rows have: two answers each."""
        return items * 2 * self.recipe.data.max_length


@dataclass(frozen=True)
class Trees:
    """An `ItemSource` of samples that are trees; long ones have a copy of the shared prefix for each answer.

    longest_shared: tokens of the longest path that shares its prefix; None: any.
    """

    rows: PackedDataset
    longest_shared: int | None

    def __len__(self) -> int:
        return self.rows.packs_per_epoch

    def at(self, number: int) -> Pack:
        """Row `number` of the endless sequence."""
        (sample,) = self.rows.at(number).samples
        return Pack((laid_out(sample, self.longest_shared),))

    def all(self) -> list[Pack]:
        """Each row once, in the order of the first epoch."""
        return [self.at(number) for number in range(len(self))]

    def state(self, number: int) -> dict[str, Any]:
        """State for a checkpoint: a digest of the samples."""
        return self.rows.state(number)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Check that these are the rows the checkpoint was made with. Raises CheckpointError if not."""
        self.rows.restore(dict(state))


def laid_out(sample: Sample, longest_shared: int | None) -> Sample:
    """The sample as it goes through a model: one that is too long to share its prefix has copies of it."""
    if longest_shared is None or longest_path(sample) <= longest_shared:
        return sample
    return with_own_prompt(sample) if MISMATCHED in sample.facts else repeat_stem(sample)
