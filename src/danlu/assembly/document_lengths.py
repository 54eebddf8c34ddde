"""The lengths of a recipe's documents before its run, from the token cache. No torch, and no tokenizer library."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from danlu.assembly.recipe_adapters import dataset_spec, own_tokenizer, recipe_tokens
from danlu.core.errors import DanluError, RecipeError
from danlu.data.prepare import cached_lengths
from danlu.planning.lengths import FULL_PACKS, Lengths
from danlu.recipe import Recipe
from danlu.recipe.loading import load
from danlu.recipe.sections import Model


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
    model = with_named_tokenizer(recipe.model)
    with suppress(DanluError, OSError):
        tokenizer = own_tokenizer(model)
        if tokens := recipe_tokens(model, described=False):
            from danlu.data.new_tokens import extended_folder

            tokenizer = str(extended_folder(tokenizer, tokens))
        lengths = cached_lengths(replace(dataset_spec(recipe, tokenizer), date=written_day(recipe)))
        if lengths is not None:
            return Lengths(tuple(lengths.tolist()), "token cache")
    return FULL_PACKS
