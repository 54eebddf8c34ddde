"""Stage `rl`: prompts as the rows of a run, and the policy's own answers to them, with rewards, as its items."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from danlu.assembly.parallelize import Placed
from danlu.assembly.recipe_adapters import longest_shared_path
from danlu.core.errors import RecipeError
from danlu.core.line_log import OptionalLineLog
from danlu.core.types import Pack
from danlu.data.batch import empty_like
from danlu.inference.cache_size import cache_gib
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.request import Completion, SamplingOptions
from danlu.inference.resolve_model import ResolvedModel
from danlu.models.config import ModelConfig
from danlu.models.loading import meta_decoder
from danlu.objectives.policy_losses import AdaptiveKl
from danlu.planning.precision import DTYPES
from danlu.recipe import Recipe
from danlu.recipe.sections import Grpo, ModelReward, PolicyGradientSection, Ppo, terms_of
from danlu.recipe.sections.environments import ENVIRONMENT
from danlu.recipe.teachers import teacher_shares, teachers_of
from danlu.rewards.build import build_rewards, build_runner
from danlu.rewards.environments.user_class import EnvironmentReward
from danlu.rewards.protocol import JudgedAnswer, Reward, StepRewards
from danlu.rewards.runner import RewardPart
from danlu.rl.answer_pairs import PairEstimator
from danlu.rl.asynchronous import AsynchronousEngine, AsynchronousRollouts
from danlu.rl.estimators import Estimator, GaeEstimator, GroupEstimator, KlPenalty, RewardShaping, TeacherAdvantages
from danlu.rl.experience import Experience
from danlu.rl.experience_trees import SUPPORT, answer_tree, with_columns
from danlu.rl.held_out_answers import HeldOutAnswers
from danlu.rl.rollout_sampler import GREEDY_NUMBERS, ExperienceSettings, Rewards, RolloutSampler
from danlu.stages.environments import episodes_of
from danlu.stages.learner import DecoderLearner
from danlu.stages.placed import PlacedDecoder
from danlu.stages.protocols import HeldOut, StageData
from danlu.stages.reader import chat_tokenizer_of
from danlu.stages.reward_model import RewardModel, load_reward_model, resolve_reward_model
from danlu.stages.rollout import engine_options, rollout_engine
from danlu.stages.rollout_processes import policy_weights, rollout_processes
from danlu.stages.tree_reader import laid_out
from danlu.stages.tree_scoring import TreeScorer
from danlu.training.data_loader import ItemSource
from danlu.training.executor import AnyLearner
from danlu.training.run_folder import ROLLOUTS


def reward_parts(recipe: Recipe, judges: Mapping[str, RewardModel] | None = None) -> list[RewardPart]:
    """The rewards of a recipe. Raises RecipeError with all that is wrong with them.

    judges: reward models that are there already, by their path.
    """

    def reward_model(section: ModelReward) -> Reward:
        if judges is not None and section.path in judges:
            return replace(judges[section.path], per_step=section.per_step)
        resolved = resolve_reward_model(section.path)
        if section.per_step and resolved.config.task != "token-classification":
            raise RecipeError(f"per_step: {section.path} judges whole answers, not their steps. Leave it out")
        return DeferredRewardModel(resolved, recipe, section.per_step)

    environment = recipe.environment
    own: list[RewardPart] = []
    if environment is not None and environment.gives_reward:
        own = [RewardPart(ENVIRONMENT, EnvironmentReward(), environment.weight)]
    return [*own, *build_rewards(recipe.rewards or (), reward_model)]


@dataclass(frozen=True)
class DeferredRewardModel:
    """A reward model that reads its weights when it first judges: on the first process alone, and not to look at rows.

    It computes in the precision and on the device of the run, whole.
    """

    resolved: ResolvedModel
    recipe: Recipe
    per_step: bool = False

    @cached_property
    def model(self) -> RewardModel:
        """The loaded model. Raises ModelError, as `load_reward_model` does."""
        assert self.recipe.precision != "auto", "a run has chosen its precision before it judges"
        model = load_reward_model(self.resolved, precision=self.recipe.precision, device=self.recipe.device)
        return replace(model, per_step=self.per_step)

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | StepRewards | None]:
        return self.model(answers)


def recipe_rewards(recipe: Recipe, judges: Mapping[str, RewardModel] | None = None) -> Rewards:
    """The rewards of the policy's answers, as in the recipe. Raises RecipeError as `reward_parts` does."""
    return build_runner(reward_parts(recipe, judges), recipe.reward_limits)


def objective_section(recipe: Recipe) -> PolicyGradientSection:
    """The policy gradient of a recipe of stage rl; where it trains on pairs, GRPO's, for the settings of a rollout."""
    return recipe.policy_gradient or Grpo()


def trains_on_pairs(recipe: Recipe) -> bool:
    """Whether a recipe of stage rl compares the best and the worst answer to each prompt (online DPO)."""
    return bool(terms_of(recipe.objective))


def sampling_options(recipe: Recipe) -> SamplingOptions:
    """Sampling options of the answers that are trained on."""
    rollout = recipe.rollout
    return SamplingOptions(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        seed=recipe.seed,
    )


def has_one_update(recipe: Recipe) -> bool:
    """Whether the policy that the ratio is to is the present one in each step: each rollout is trained on in one."""
    return recipe.batch.updates * recipe.batch.passes == 1 and not ratio_is_to_sampled(recipe)


def ratio_is_to_sampled(recipe: Recipe) -> bool:
    """Whether the ratio is to the sampling distribution, as the engine has it: true for asynchronous rollouts without
    `importance`.

    With `importance` it is to the trainer's policy when the rollout is taken up, and the correction bridges the rest
    (decoupled PPO: arXiv:2110.00641; as in AReaL, arXiv:2505.24298).
    """
    return recipe.rollout.staleness > 0 and objective_section(recipe).importance is None


def has_old_logprobs(recipe: Recipe) -> bool:
    """Whether the engine's log-probabilities are those that the ratio is to, so that the trainer need not make its own:
    by being these to the bit, or by choice."""
    is_exact = recipe.numerics == "exact" and recipe.rollout.staleness == 0
    return is_exact or ratio_is_to_sampled(recipe)


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
    virtual = 0 if placed.adapters is None else len(placed.adapters.virtual_token_ids)
    settings = _settings(recipe, chat, placed.model.config, virtual)
    longest = max(len(prompt.tokens) for prompt in (*prompts.train, *prompts.held_out))
    answers = settings.prompts * (settings.samples + settings.greedy)
    longest = longest + settings.max_new_tokens if recipe.environment is None else recipe.data.max_length
    dtype, options, lengths = DTYPES[recipe.precision], engine_options(recipe), [virtual + longest] * answers
    needed = cache_gib(placed.model, dtype, lengths, options, placed.parallel.pipeline)
    engine = rollout_engine(recipe, placed.placed, decode=chat.decode, cache_gib=needed)
    engine.sleep()
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
        of_whole = cache_gib(meta_decoder(placed.model.config), dtype, lengths, options)
        sampler.asynchronous = AsynchronousRollouts(
            placed.asynchronous_engine(recipe, placed.placed, of_whole) if ranks.leads else None,
            partial(policy_weights, placed.placed),
            recipe.rollout.staleness,
            ranks.world,
            _rollouts(recipe, len(prompts.train)),
            None if episodes is None else lambda number: prompts.order.at(number % GREEDY_NUMBERS),
        )
    experience = Experience(sampler, estimator_of(recipe), _scorer(recipe, learner), log, through_model, chat.decode)
    if not prompts.held_out:
        return experience, None
    return experience, HeldOutAnswers(experience, prompts.held_out)


def _rollouts(recipe: Recipe, prompts: int) -> int:
    """The number of rollouts of a run over `prompts` prompts."""
    batch = recipe.batch
    assert batch.prompts is not None, "the recipe's rules ask for prompts"
    if recipe.steps is not None:
        return math.ceil(recipe.steps / (batch.updates * batch.passes))
    return math.ceil(math.ceil((recipe.epochs or 1) * prompts * batch.passes) / (batch.prompts * batch.passes))


def estimator_of(recipe: Recipe) -> Estimator:
    """The estimator of the tokens' advantages."""
    if trains_on_pairs(recipe):
        return PairEstimator()
    estimator = _estimator_of_rewards(recipe)
    if not recipe.teachers_advise or recipe.divergence is None:
        return estimator
    return TeacherAdvantages(estimator, teacher_shares(recipe), recipe.divergence.weight)


def _estimator_of_rewards(recipe: Recipe) -> Estimator:
    section = objective_section(recipe)
    overlong = section.overlong
    shaping = RewardShaping(
        None if overlong is None else overlong.margin,
        1.0 if overlong is None else overlong.weight,
        recipe.rollout.max_new_tokens,
        section.mask_truncated,
    )
    kl = None
    if section.kl is not None and section.kl.in_reward and section.kl.coefficient > 0:
        target = section.kl.target
        coefficient = AdaptiveKl(section.kl.coefficient, target or 1.0, section.kl.horizon)
        kl = KlPenalty(coefficient, target is not None, section.kl.kl_estimator)
    if isinstance(section, Ppo):
        return GaeEstimator(section.discount, section.gae, section.whiten, section.bootstrap_truncated, shaping, kl)
    return GroupEstimator(
        section.baseline, section.scale, section.rewards_apart, shaping, kl, section.process_supervision
    )


def _settings(recipe: Recipe, chat: ChatTokenizer, config: ModelConfig, virtual_tokens: int) -> ExperienceSettings:
    def rotary_length(prompt_tokens: int) -> int:
        whole = prompt_tokens + recipe.rollout.max_new_tokens
        whole = whole if recipe.environment is None else recipe.data.max_length
        return min(virtual_tokens + whole, config.context_length)

    rollout, batch, section = recipe.rollout, recipe.batch, objective_section(recipe)
    assert batch.prompts is not None, "the recipe's rules ask for prompts"
    stop_ids, stop_strings = chat.split_stops(rollout.stop_strings)
    return ExperienceSettings(
        prompts=batch.prompts,
        samples=rollout.samples,
        sampling=sampling_options(recipe),
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
        rotary_length=rotary_length if config.rotates_by_text_length else None,
    )


def _scorer(recipe: Recipe, learner: AnyLearner) -> TreeScorer | None:
    """The pass without gradients over a rollout, where something is to be asked."""
    if trains_on_pairs(recipe):
        return None
    section = objective_section(recipe)
    reference = section.kl is not None and section.kl.in_reward and section.kl.coefficient > 0
    values = isinstance(section, Ppo)
    teachers = tuple(teachers_of(recipe)) if recipe.teachers_advise else ()
    old = not has_old_logprobs(recipe) and (not has_one_update(recipe) or reference or values or bool(teachers))
    if not (old or reference or values or teachers):
        return None
    assert isinstance(learner, DecoderLearner), "a decoder learns from answers"
    return TreeScorer(learner, old, reference, values, recipe.rollout.temperature, teachers)


def empty_item(recipe: Recipe) -> Pack:
    """An item without targets that has the columns and facts of the stage's items."""
    completion = Completion(0, 0, [0], [0.0], [0.0], None, [0], "", "stop")
    parts = [f"reward/{name}" for name in recipe.reward_weights]
    names = ["reward", "group", "length", "truncated", "fresh", *parts, *estimator_of(recipe).facts]
    item = answer_tree([0], [completion], "filled up", {name: [np.nan] for name in names})
    columns = {name: np.zeros(2, np.float32) for name in estimator_of(recipe).columns}
    if sampling_options(recipe).truncates:
        columns[SUPPORT] = np.full((2, 1), -1, np.int32)
    return empty_like(with_columns(item, columns).samples[0])
