"""Language models in a verification: a small decoder, or adapters on one, and packs of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from danlu.assembly.recipe_adapters import check_adapters
from danlu.errors import RecipeError
from danlu.language.builder import placed_decoder
from danlu.language.placed import PlacedDecoder
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import read_config, resolve_folder
from danlu.models.presets import from_scratch
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout, Sizes, problems
from danlu.parallel.ranks import Ranks
from danlu.placing import place, saved_adapter, subject_of
from danlu.recipe import Recipe
from danlu.stages import STAGES
from danlu.verify.collective_traffic import sent_by_decoder
from danlu.verify.data import fed, mapped
from danlu.verify.proxy import Groups, PlacedProxy, Prepared
from danlu.verify.proxy_model import LONGEST, Small, small_recipe

_WORDS = 32_000  # where nobody knows how large the vocabulary will be


@dataclass(frozen=True)
class DecoderProxy:
    """A `Proxy`: a decoder."""

    config: ModelConfig
    words: int | None = None
    """Prompts in words become tokens below it; None: by the recipe's tokenizer."""
    norms: bool = True

    @property
    def tied(self) -> bool:
        return self.config.tie_word_embeddings

    def place(self, recipe: Recipe, ranks: Ranks, device: torch.device, resumed: Path | None) -> PlacedDecoder:
        subject = subject_of(
            recipe,
            self.config,
            device,
            saved=None if resumed is None or recipe.adapter is None else saved_adapter(resumed),
            resumed=resumed is not None,
            encode=lambda text: self._encoded(text, recipe),
            ranks=ranks,
        )
        placed = place(subject, recipe, ranks, device, resumed=resumed is not None)
        return placed_decoder(recipe, STAGES[recipe.stage], placed, self.config, device)

    def sent(self, learning: PlacedProxy, groups: Groups) -> list[CollectiveTraffic]:
        return sent_by_decoder(learning, groups)

    def _encoded(self, text: str, recipe: Recipe) -> list[int]:
        """For prompts that start from words."""
        if self.words is not None:
            return [byte % self.words for byte in text.encode()]
        # transformers, seconds and hundreds of MiB that only such a recipe needs.
        from danlu.data.tokenizer import load_tokenizer
        from danlu.rollout.chat_tokenizer import ChatTokenizer

        named = recipe.model.tokenizer or recipe.model.path
        return ChatTokenizer(
            load_tokenizer(str(named), recipe.model.chat_template, recipe.model.chat_template_date)
        ).encode_prompt(text)


def prepared(recipe: Recipe, layout: Layout, count: int, folder: Path, *, full: bool) -> Prepared:
    """So many packs, and a small model for them; what it starts from is made in `folder`.

    Raises RecipeError for a layout that the large model cannot be cut into, ModelError for adapters of another one.
    """
    check_adapters(recipe.model, recipe.adapter)
    if not full:
        short = min(recipe.data.max_length, LONGEST)
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": short})})
    packs = fed(recipe, count)
    config = _config(recipe, packs.words)
    if wrong := list(problems(recipe.parallel, _sizes(config))):
        raise RecipeError(wrong)
    small = Small(recipe, config) if full else small_recipe(recipe, config, layout, folder)
    assert full or not list(problems(small.recipe.parallel, _sizes(small.config))), "made small alike"
    words = small.config.vocab_size
    return Prepared(
        recipe=small.recipe,
        proxy=DecoderProxy(small.config, None if full else words),
        items=packs.packs if full and packs.words is not None else mapped(packs.packs, words),
        parameters=small.config.parameter_count(),
        counted_in="packed sequences",
        model=_said(small.config, config),
        data=packs.source,
        notes=small.notes,
    )


def _config(recipe: Recipe, words: int | None) -> ModelConfig:
    if recipe.model.path is not None:
        return read_config(resolve_folder(recipe.model.path))
    given = recipe.model.config if isinstance(recipe.model.config, dict) else {}
    return from_scratch(recipe.model, words or int(given.get("vocab_size", _WORDS)), 1, 2)


def _sizes(config: ModelConfig) -> Sizes:
    return Sizes(config.heads, config.kv_heads, config.intermediate_size, config.vocab_size)


def _said(small: ModelConfig, config: ModelConfig) -> str:
    def said(one: ModelConfig) -> str:
        return f"{one.layers} layers of {one.heads} heads ({one.kv_heads} of keys), width {one.hidden_size}"

    instead = "" if small == config else f" in place of {said(config)}"
    return f"{small.family}, {said(small)}{instead}"
