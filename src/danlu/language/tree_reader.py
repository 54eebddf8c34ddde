"""Rows whose answers are compared or judged as the items of a run: each is a tree of tokens, and a pack by itself."""

from __future__ import annotations

from typing import TextIO

from danlu.data.batch import empty_like
from danlu.data.packed_dataset import PackedDataset
from danlu.data.sources import reported_sources
from danlu.language.reader import data_lines, dataset_spec, lines_beyond_positions, prepared_data
from danlu.recipe import Recipe
from danlu.stage_protocols import Material
from danlu.types import Pack


class TreeReader:
    """A `Reader`: rows of stages preference and reward."""

    items = "pairs"
    counted = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def read(self, stream: TextIO) -> Material:
        """Of several processes the first tokenises; the others find it in the cache."""
        recipe, spec = self.recipe, dataset_spec(self.recipe)
        prepared = prepared_data(spec, stream)
        assert prepared.train is not None, "the recipe's rules refuse streaming"
        rows = spec.packed(prepared.train)
        return Material(
            rows,
            rows.packs_per_epoch,
            None if prepared.eval is None else _in_order(spec.packed(prepared.eval, shuffle=False)),
            data_lines(prepared) + lines_beyond_positions(recipe, prepared),
            tokenizer=prepared.tokenizer,
            sources=reported_sources(recipe.data),
            empty=empty_like(rows.at(0).samples[0]),
        )

    def amount(self, items: int) -> str:
        """So many rows in words."""
        return f"{items} rows" if self.recipe.row_type != "preference" else f"{items} pairs"

    def targets(self, items: int) -> int:
        """The most targets that so many rows have: two answers each."""
        return items * 2 * self.recipe.data.max_length


def _in_order(rows: PackedDataset) -> list[Pack]:
    return [rows.at(number) for number in range(rows.packs_per_epoch)]
