"""The lengths of a recipe's documents before its run, from the token cache. No torch, and no tokenizer library."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.assembly.recipe_adapters import dataset_spec, own_tokenizer, recipe_tokens
from danlu.core.errors import DanluError, RecipeError
from danlu.data.store_names import may_be_cached
from danlu.planning.lengths import FULL_PACKS, Lengths
from danlu.recipe import Recipe
from danlu.recipe.loading import load
from danlu.recipe.sections import Model

if TYPE_CHECKING:
    from danlu.data.prepare import DatasetSpec


def with_named_tokenizer(model: Model) -> Model:
    """The same model with its tokenizer by name, so that of a hub id nothing but the tokenizer is fetched."""
    return model.model_copy(update={"tokenizer": model.tokenizer or model.path})


def written_day(recipe: Recipe) -> str | None:
    """The day that a chat template is to write: the recipe's, or that of the run which is in its output folder."""
    run = Path(recipe.output).expanduser() / "recipe.yaml"
    if recipe.model.chat_template_date is None and run.is_file():
        with suppress(RecipeError):  # a run of an older danlu perhaps; `danlu train` says what is wrong with it
            return load(run).recipe.model.chat_template_date
    return recipe.model.chat_template_date


def document_lengths(recipe: Recipe) -> Lengths:
    """The lengths of the documents that a recipe trains on, if its rows are in the token cache; else full packs.

    No tokenizer is loaded, and nothing is raised: `danlu preview` and a run say what is wrong with the rows. Answers
    that are drawn in training, and packs that grow in stages, are full packs.
    """
    section = recipe.long_context
    if recipe.stage in ("classify", "rl") or (section is not None and section.stages):
        return FULL_PACKS
    if not may_be_cached(recipe.data):
        return FULL_PACKS
    from danlu.data.prepare import cached_lengths  # here: it imports numpy

    model = with_named_tokenizer(recipe.model)
    with suppress(DanluError, OSError):
        tokenizer = own_tokenizer(model)
        if tokens := recipe_tokens(model, described=False):
            from danlu.data.new_tokens import extended_folder

            tokenizer = str(extended_folder(tokenizer, tokens))
        spec = replace(dataset_spec(recipe, tokenizer), date=written_day(recipe))
        if recipe.row_type is not None:
            return _row_lengths(recipe, spec)
        lengths = cached_lengths(spec)
        if lengths is not None:
            return Lengths(tuple(lengths.tolist()), "token cache")
    return FULL_PACKS


def _row_lengths(recipe: Recipe, spec: DatasetSpec) -> Lengths:
    """The lengths of rows with compared or judged answers: their trees, as a step has them."""
    from danlu.assembly.recipe_adapters import longest_shared_path
    from danlu.data.prepare import cached_runs
    from danlu.planning.row_batches import RowTrees

    runs = cached_runs(spec, longest_shared_path(recipe.data, recipe.model, recipe.adapter))
    if runs is None:
        return FULL_PACKS
    trees = RowTrees(*runs)
    return Lengths(tuple(trees.tokens.tolist()), "token cache", trees)
