"""Stage `rl`: prompts as the rows of a run, and the builder of the decoder that answers them and learns."""

from __future__ import annotations

from contextlib import closing
from typing import TextIO

from danlu.data.prompts import PromptOrder, PromptSpec, read_prompts
from danlu.data.tokenizing import tokenizer_info
from danlu.language.builder import DecoderBuilder
from danlu.language.reader import tokenizer_of, tokenizer_path
from danlu.language.reinforcement import empty_item, reward_parts
from danlu.recipe import Recipe
from danlu.rewards.build import check_columns
from danlu.stage_protocols import Material, Prompts
from danlu.train.progress import RowProgress
from danlu.train.run_folder import Start


class PromptReader:
    """A `Reader`: the prompts of stage rl."""

    items = "prompts"
    counted = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def read(self, stream: TextIO) -> Material:
        """Every process reads and renders the prompts."""
        recipe, model = self.recipe, self.recipe.model
        spec = PromptSpec(
            recipe.data,
            tokenizer_path(recipe),
            model.chat_template,
            recipe.seed,
            recipe.rollout.max_new_tokens,
            model.chat_template_date,
        )
        with closing(RowProgress(stream)) as progress:
            prompts = read_prompts(spec, progress=progress)
        parts = reward_parts(recipe)
        for prompt in (*prompts.train, *prompts.eval):
            check_columns(parts, prompt.row, prompt.where)
        return Material(
            None,
            len(prompts.train) * recipe.batch.passes,
            None,
            prompts.lines(),
            tokenizer=tokenizer_info(tokenizer_of(recipe)),
            empty=empty_item(recipe),
            prompts=Prompts(PromptOrder(prompts.train, recipe.seed), prompts.train, prompts.eval),
        )

    def amount(self, items: int) -> str:
        """So many prompts in words."""
        return f"{items} prompts x {self.recipe.rollout.samples} answers"

    def targets(self, items: int) -> int:
        """The most targets that so many prompts have."""
        rollout = self.recipe.rollout
        return items * rollout.samples * rollout.max_new_tokens


class RolloutBuilder(DecoderBuilder):
    """A `ModelBuilder`: the decoder that answers and learns."""

    def check(self, start: Start | None) -> None:
        """Also raises RecipeError for rewards that cannot be."""
        super().check(start)
        reward_parts(self.recipe)
