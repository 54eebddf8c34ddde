"""Stage distill with `on_policy`: the policy's own answers to a share of the rows, drawn while it is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.core.line_log import OptionalLineLog
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.recipe import Recipe
from danlu.rl.on_policy_rows import OnPolicyRows, OnPolicySettings, prompt_tokens
from danlu.stages.protocols import HeldOut, StageData, StoredRows
from danlu.stages.reader import chat_tokenizer_of
from danlu.stages.rollout import sampling_options, sleeping_engine
from danlu.training.data_loader import ItemSource
from danlu.training.executor import AnyLearner
from danlu.training.run_folder import ROLLOUTS

if TYPE_CHECKING:
    from danlu.stages.placed import PlacedDecoder


def on_policy_settings(recipe: Recipe, chat: ChatTokenizer) -> OnPolicySettings:
    """Settings of the rows that the policy of a recipe answers itself."""
    rollout = recipe.rollout
    stop_ids, stop_strings = chat.split_stops(rollout.stop_strings)
    return OnPolicySettings(
        share=float(recipe.on_policy),
        per_step=recipe.batch.packs(recipe.data.max_length),
        sampling=sampling_options(rollout, recipe.seed),
        max_new_tokens=rollout.max_new_tokens,
        max_length=recipe.data.max_length,
        stop_ids=chat.stop_ids | stop_ids,
        stop_strings=tuple(stop_strings),
        seed=recipe.seed,
    )


def longest_prompt(rows: StoredRows) -> int:
    """Tokens of the longest prompt that the policy may have to answer. Raises DataError for a row without a prompt."""
    samples = rows.train
    return max(prompt_tokens(samples.sample(number)) for number in range(len(samples)))


def on_policy_items(
    placed: PlacedDecoder, stage_data: StageData, learner: AnyLearner, folder: Path
) -> tuple[ItemSource, HeldOut | None]:
    """The rows that were read, with own answers to a share of them where the recipe asks for it."""
    source, held_out = stage_data.items()
    if placed.recipe.on_policy:
        assert stage_data.stored is not None, "the recipe's rules refuse streaming"
        source = on_policy_rows(placed, source, stage_data.stored, folder)
    return source, held_out


def on_policy_rows(placed: PlacedDecoder, rows: ItemSource, stored: StoredRows, folder: Path) -> OnPolicyRows:
    """`rows` with the policy's own answers to a share of them; stored: the same rows, to be asked for by number."""
    recipe = placed.recipe
    config = placed.model.config
    chat = chat_tokenizer_of(recipe, config)
    settings = on_policy_settings(recipe, chat)
    virtual = len(placed.placed.subject.virtual_token_ids)
    if config.rotates_by_text_length:
        settings = replace(settings, rotary_length=lambda tokens: min(virtual + tokens, config.context_length))
    length = virtual + min(longest_prompt(stored) + settings.max_new_tokens, settings.max_length)
    engine = sleeping_engine(recipe, placed.placed, chat.decode, [length] * settings.per_step)
    log = OptionalLineLog(folder / ROLLOUTS) if placed.parallel.ranks.leads else None
    return OnPolicyRows(rows, engine, settings, chat.decode, log)
