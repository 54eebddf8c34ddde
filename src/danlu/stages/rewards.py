"""The rewards of stage rl, and the reward models among them.

Those that are adapters on the policy's own base are put upon that, which is not loaded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import nn

from danlu.adapters.adapter_config import open_adapter
from danlu.adapters.peft_folder import add_adapter
from danlu.assembly.parallelize import Subject
from danlu.assembly.score_head import required_score_head
from danlu.core.errors import RecipeError
from danlu.core.layer_types import TRAINED
from danlu.inference.load_model import LoadedModel, load_chat_tokenizer
from danlu.inference.resolve_model import ResolvedModel
from danlu.models.config import same_rotation
from danlu.numerics.dtypes import DTYPES
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.sections import ModelReward, Parallel, QuantizationSection
from danlu.recipe.sections.environments import ENVIRONMENT
from danlu.recipe.value import VALUE
from danlu.rewards.build import build_rewards, build_runner
from danlu.rewards.environments.user_class import EnvironmentReward
from danlu.rewards.protocol import JudgedAnswer, Reward, StepRewards
from danlu.rewards.runner import RewardPart, RewardRunner
from danlu.stages.reward_model import RewardModel, load_reward_model
from danlu.stages.role_configs import has_base_of_policy, resolve_reward_model
from danlu.training.units import format_bytes

_PLAIN_STARTS = (None, True, False, "gaussian")
"""Values of `init_lora_weights` that leave the base as it is."""


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
        assert self.recipe.activations != "auto", "a run has chosen its precision before it judges"
        model = load_reward_model(self.resolved, precision=self.recipe.activations, device=self.recipe.device)
        return replace(model, per_step=self.per_step)

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | StepRewards | None]:
        return self.model(answers)


def recipe_rewards(recipe: Recipe, judges: Mapping[str, RewardModel] | None = None) -> RewardRunner:
    """The rewards of the policy's answers, as in the recipe. Raises RecipeError as `reward_parts` does."""
    return build_runner(reward_parts(recipe, judges), recipe.reward_limits)


def rewards_on_base(recipe: Recipe, subject: Subject, ranks: Ranks) -> tuple[dict[str, RewardModel], list[str]]:
    """Returns (reward models by the path that the recipe has, lines for the console).

    Their adapters are put into the policy's model, which is not placed yet: frozen, and switched on while they judge.
    """
    judges: dict[str, RewardModel] = {}
    lines = []
    for number, section in enumerate(recipe.rewards or ()):
        if not isinstance(section, ModelReward) or section.path in judges:
            continue
        resolved = resolve_reward_model(section.path)
        if not has_base_of_policy(recipe, resolved):
            continue
        where = f"rewards.{number}: {section.path} is an adapter on the policy's base"
        reason = _needs_base_of_its_own(recipe.parallel, recipe.base_quantization, subject, resolved, ranks)
        if reason is not None:
            lines.append(f"{where}, which the first process loads once more: {reason}")
            continue
        judges[section.path], size = _judge(recipe.activations, subject, resolved, len(judges))
        lines.append(f"{where}: {format_bytes(size)} are put upon that, and it is not loaded again")
    return judges, lines


def _needs_base_of_its_own(
    section: Parallel,
    quantization: QuantizationSection | None,
    subject: Subject,
    resolved: ResolvedModel,
    ranks: Ranks,
) -> str | None:
    """Returns why a reward model cannot judge on the policy's base; None where it can."""
    (stack,), adapters = resolved.stacks, subject.adapters
    assert adapters is not None, "the recipe trains an adapter"
    is_sharded = section.shard != "none" and not ranks.dense_data.all.alone
    if ranks.tensor.size > 1 or ranks.pipeline.size > 1 or is_sharded or section.workers == "threads":
        return "the policy's is cut among processes or copied"
    if any(added.base_changing_sites() for added in adapters.added.values()):
        return "the policy's adapter took its start out of it"
    if resolved.virtual_tokens_per_prompt or any(
        adapter.values.get("init_lora_weights") not in _PLAIN_STARTS for adapter in stack
    ):
        return "its adapter is not one that can be switched (virtual tokens, or a start taken out of the base)"
    if not same_rotation(subject.model.config, resolved.config):
        return "it was trained with another rotary embedding of the base (long_context)"
    if stack[-1].quantization != (None if quantization is None else quantization.of_base()):
        return "the policy's is held in other bits than when it was trained"
    return None


def _judge(precision: str, subject: Subject, resolved: ResolvedModel, number: int) -> tuple[RewardModel, int]:
    """Returns (a reward model on the policy's base, bytes of its adapters and its head)."""
    adapters, model = subject.adapters, subject.model
    assert adapters is not None and precision != "auto", "it trains one, and a run has chosen its precision"
    (stack,) = resolved.stacks
    names = [f"reward-{number}-{place}" for place in range(len(stack))]
    with adapters.switched_to(()):
        for name, folder in zip(names, stack, strict=True):
            adapters.activate()  # copies of the base's parameters are not made of another adapter's copies
            add_adapter(adapters, name, open_adapter(folder.path))
    adapters.train_only(*(name for name in (TRAINED, VALUE) if name in adapters.added))
    head: nn.Linear = required_score_head(resolved.folder, stack)
    head.to(model.embed_tokens.weight.device).requires_grad_(False)
    loaded = LoadedModel(
        folder=resolved.folder,
        model=model,
        chat_tokenizer=load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder),
        stop_ids=frozenset(),
        dtype=DTYPES[precision],
        score_head=head,
    )
    tensors = [*(tensor for name in names for tensor in adapters.tensors(name).values()), *head.parameters()]
    switched_on = partial(adapters.switched_to, names)
    judge = RewardModel(loaded, model.config.context_length, resolved.config.task, switched_on)
    return judge, sum(tensor.nbytes for tensor in tensors)
