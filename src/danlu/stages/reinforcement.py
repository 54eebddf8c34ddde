"""Stage `rl`: prompts as the rows of a run, and the policy's own answers to them, with rewards, as its items."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from danlu.assembly.parallelize import Placed
from danlu.assembly.recipe_adapters import longest_shared_path
from danlu.core.line_log import OptionalLineLog
from danlu.core.run_files import ROLLOUTS
from danlu.core.types import Pack
from danlu.inference.cache_size import cache_gib
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.grammar import prompt_grammar
from danlu.models.config import ModelConfig
from danlu.models.loading import meta_decoder
from danlu.numerics.dtypes import DTYPES
from danlu.recipe import Recipe
from danlu.recipe.policy_scores import objective_section, scores_of
from danlu.rl.asynchronous import AsynchronousEngine, AsynchronousRollouts
from danlu.rl.experience import Experience
from danlu.rl.rollout_sampler import GREEDY_NUMBERS, ExperienceSettings, Rewards, RolloutSampler
from danlu.stages.environments import episodes_of
from danlu.stages.learner import DecoderLearner
from danlu.stages.placed import PlacedDecoder
from danlu.stages.policy_objective import estimator_of
from danlu.stages.protocols import HeldOut, StageData
from danlu.stages.reader import chat_tokenizer_of
from danlu.stages.rewards import recipe_rewards
from danlu.stages.rollout import engine_options, grammars_of, sampling_options, sleeping_engine
from danlu.stages.rollout_processes import policy_weights, rollout_processes
from danlu.stages.tree_reader import laid_out
from danlu.stages.tree_scoring import TreeScorer
from danlu.training.data_loader import ItemSource
from danlu.training.executor import AnyLearner


@dataclass(frozen=True)
class AnsweringDecoder(PlacedDecoder):
    """A policy that answers prompts while it is trained, with the rewards of its answers."""

    rewards: Callable[[Recipe], Rewards] = recipe_rewards
    asynchronous_engine: Callable[[Recipe, Placed, float], AsynchronousEngine] = rollout_processes
    """Makes the engine next to the trainer where the recipe asks for one, with this many GiB of cache."""


def experience_items(
    placed: AnsweringDecoder, stage_data: StageData, learner: AnyLearner, folder: Path
) -> tuple[ItemSource, HeldOut | None]:
    """The policy's answers to prompts, made while it is trained; and those to held-out prompts, for evaluations."""
    prompts = stage_data.prompts
    assert prompts is not None, "stage rl reads prompts"
    recipe, ranks = placed.recipe, placed.parallel.ranks
    chat = chat_tokenizer_of(recipe, placed.model.config)
    virtual = len(placed.placed.subject.virtual_token_ids)
    settings = _settings(recipe, chat, placed.model.config, virtual)
    rollouts = _rollouts(recipe, len(prompts.train))
    settings = replace(settings, max_steps=rollouts * settings.updates * settings.passes)
    longest = max(len(prompt.tokens) for prompt in (*prompts.train, *prompts.held_out))
    answers = settings.prompts * (settings.samples + settings.greedy)
    longest = longest + settings.max_new_tokens if recipe.environment is None else recipe.data.max_length
    lengths = [virtual + longest] * answers
    grammars = grammars_of(recipe, chat, placed.model.config.vocab_size)
    engine = sleeping_engine(recipe, placed.placed, chat.decode, lengths, grammars)
    rewards = placed.rewards(recipe)
    shared = longest_shared_path(recipe.data, recipe.model, recipe.adapter)
    if settings.rotary_length is not None and recipe.data.share_stem:
        shared = None  # all answers to a prompt are rotated by the same length

    def through_model(item: Pack) -> Pack:
        return Pack((laid_out(item.samples[0], shared),))

    log = OptionalLineLog(folder / ROLLOUTS) if ranks.leads else None
    episodes = episodes_of(recipe, chat, placed.placed.subject, settings.sampling, ranks.world)
    sampler = RolloutSampler(prompts.order, engine, rewards, settings, ranks.world, episodes=episodes)
    if recipe.rollout.staleness > 0:
        whole, dtype = meta_decoder(placed.model.config), DTYPES[recipe.activations]
        of_whole = cache_gib(whole, dtype, lengths, engine_options(recipe))
        sampler.asynchronous = AsynchronousRollouts(
            placed.asynchronous_engine(recipe, placed.placed, of_whole) if ranks.leads else None,
            partial(policy_weights, placed.placed),
            recipe.rollout.staleness,
            ranks.world,
            rollouts,
            None if episodes is None else lambda number: prompts.order.at(number % GREEDY_NUMBERS),
        )
    experience = Experience(sampler, estimator_of(recipe), _scorer(recipe, learner), log, through_model, chat.decode)
    if not prompts.held_out:
        return experience, None
    return experience, partial(experience.held_out, prompts.held_out)


def _rollouts(recipe: Recipe, prompts: int) -> int:
    """The number of rollouts of a run over `prompts` prompts."""
    batch = recipe.batch
    assert batch.prompts is not None, "the recipe's rules ask for prompts"
    if recipe.steps is not None:
        return math.ceil(recipe.steps / (batch.updates * batch.passes))
    return math.ceil(math.ceil((recipe.epochs or 1) * prompts * batch.passes) / (batch.prompts * batch.passes))


def _settings(recipe: Recipe, chat: ChatTokenizer, config: ModelConfig, virtual_tokens: int) -> ExperienceSettings:
    def rotary_length(prompt_tokens: int) -> int:
        whole = prompt_tokens + recipe.rollout.max_new_tokens
        whole = whole if recipe.environment is None else recipe.data.max_length
        return min(virtual_tokens + whole, config.context_length)

    rollout, batch, section = recipe.rollout, recipe.batch, objective_section(recipe)
    assert batch.prompts is not None, "the recipe's rules ask for prompts"
    stop_ids, stop_strings = chat.split_stops(rollout.stop_strings)
    form = rollout.format
    return ExperienceSettings(
        prompts=batch.prompts,
        samples=rollout.samples,
        sampling=sampling_options(rollout, recipe.seed),
        max_new_tokens=rollout.max_new_tokens,
        updates=batch.updates,
        passes=batch.passes,
        stop_ids=chat.stop_ids | stop_ids,
        stop_strings=tuple(stop_strings),
        greedy=section.baseline == "greedy",
        resample=section.resample,
        failures=recipe.reward_limits.failures,
        vocab_size=config.vocab_size,
        seed=recipe.seed,
        grammar=None if form is None else partial(prompt_grammar, form.kinds, chat.tokenizer),
        rotary_length=rotary_length if config.rotates_by_text_length else None,
    )


def _scorer(recipe: Recipe, learner: AnyLearner) -> TreeScorer | None:
    """The pass without gradients over a rollout, where something is to be asked."""
    asked = scores_of(recipe)
    if not asked:
        return None
    assert isinstance(learner, DecoderLearner), "a decoder learns from answers"
    return TreeScorer(learner, asked.old, asked.reference, asked.values, recipe.rollout.temperature, asked.teachers)
