"""Rules about the model: where it starts, its adapter and quantization, and keys that only language models read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any, Literal

from danlu.core.errors import RecipeError
from danlu.recipe.sections import TRAINABLE, Continue, Dora, LowRank, Model, Recipe
from danlu.recipe.yaml_tree import Problem

TEMPLATE_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""The variables by which a chat template gets a conversation."""


def model_has_one_start(model: Model, stage: str) -> Iterator[Problem]:
    """Exactly one of path, preset and config is given, and a language model from scratch has a tokenizer."""
    given = [name for name in model.one_of if getattr(model, name) is not None]
    if len(given) != 1:
        state = "path, preset and config are all missing" if not given else f"both {' and '.join(given)} are given"
        message = f"{state}: give exactly one (path: a folder to start from; preset or config: from scratch)"
        yield Problem("model", message, reads=tuple(f"model.{name}" for name in model.one_of))
    elif given != ["path"] and model.tokenizer is None and stage != "classify":
        message = f"a model from a {given[0]} needs a tokenizer: add model.tokenizer (a folder or a hub id)"
        yield Problem("model.tokenizer", message, reads=(f"model.{given[0]}",))


def template_date_is_valid(given: str | None) -> Iterator[Problem]:
    """The date that chat templates are given is a day, written as `date.isoformat` writes it."""
    if given is None:
        return
    try:
        normalized = date.fromisoformat(given).isoformat()
    except ValueError:
        normalized = None
    if normalized != given:
        yield Problem("model.chat_template_date", f"{given!r} is no day: write year, month and day as 2026-11-22")


def template_kwargs_are_free(kwargs: Mapping[str, Any]) -> Iterator[Problem]:
    """Variables of the chat template have names that it does not get a conversation by."""
    for name in kwargs:
        key = "model.chat_template_kwargs"
        if name in TEMPLATE_ARGUMENTS:
            yield Problem(key, f"{name}: danlu gives the template this variable with each conversation. Leave it out")
        elif not name.isidentifier():
            yield Problem(key, f"{name!r} is no name of a variable: letters, digits and underscores, a letter first")


def adapter_has_base_model(recipe: Recipe) -> Iterator[Problem]:
    """An adapter has a finished model under it, a quantized model an adapter, and an initialization what it needs."""
    model, adapter = recipe.model, recipe.adapter
    if model.path is None and adapter is not None:
        message = "an adapter is trained on a finished model: give model.path"
        yield Problem("adapter", message, reads=("model.path",))
    if model.path is None and model.adapters:
        yield Problem("model.adapters", "adapters sit on a finished model: give model.path", reads=("model.path",))
    if isinstance(adapter, Continue) and not model.adapters:
        message = "continue trains the last of model.adapters on, and there is none. Name one, or choose a kind"
        yield Problem("adapter.kind", message, reads=("model.adapters",))
    if isinstance(adapter, Continue) and model.tokens:
        message = "adapter: continue trains an adapter with the rows that it has. Add a new adapter, or no tokens"
        yield Problem("model.tokens", message, reads=("adapter.kind",))
    texts = [token.text for token in model.tokens]
    for number, text in enumerate(texts):
        if not text:
            yield Problem(f"model.tokens.{number}", "a token has a text; this one is empty")
        if text in texts[:number]:
            yield Problem(f"model.tokens.{number}", f"{text!r} is given twice")
    of_values = None if recipe.value is None else recipe.value.adapter
    if isinstance(of_values, LowRank) and of_values.trainable_tokens:
        message = (
            "the adapter of values has no rows of tokens. Leave them out, or name them in adapter.trainable_tokens"
        )
        yield Problem("value.adapter.trainable_tokens", message)
    if isinstance(adapter, Dora) and model.adapters:
        message = "dora scales the weights themselves, so it cannot be stacked on model.adapters. Use kind: lora"
        yield Problem("adapter.kind", message, reads=("model.adapters",))
    if isinstance(adapter, LowRank) and adapter.init == "loftq" and recipe.base_quantization is None:
        message = "loftq makes up for what quantization loses: add quantization: nf4, or choose another init"
        yield Problem("adapter.init", message, reads=("quantization",))
    if recipe.base_quantization is not None and adapter is None:
        message = "a quantized model cannot be trained itself: add adapter: lora (or another), or leave it out"
        if type(recipe.quantization) in TRAINABLE:
            message += "; `trained: true` trains all weights for this format"
        yield Problem("quantization", message, reads=("adapter",))


def preset_suits_stage(preset: str | None, stage: str) -> Iterator[Problem]:
    """Stage classify trains lenet5, and no other stage does."""
    if stage != "classify" and preset == "lenet5":
        message = "lenet5 classifies images: it needs stage classify. For language models use tiny or small"
        yield Problem("model.preset", message, reads=("stage",))
    elif stage == "classify" and preset not in (None, "lenet5"):
        yield Problem("model.preset", f"{preset} is a language model; stage classify trains lenet5", reads=("stage",))


def language_stage(recipe: Recipe, reader: str) -> Literal["pretrain", "sft", "preference", "reward", "distill"]:
    """Returns the stage of a recipe for a language model that trains on the content of its rows.

    Raises RecipeError for stages classify and rl, which `reader` (a verb) can do nothing with.
    """
    if recipe.stage == "classify":
        raise RecipeError(f"stage: classify has no tokens, and {reader} is for language models")
    if recipe.stage == "rl":
        raise RecipeError(f"stage: rl draws its answers while it trains, and {reader} is for rows that hold them")
    return recipe.stage
