"""The models of a stage by their roles: where their weights are from, which are trained, what they share. No torch.

Nothing is read from folders: a path may lead to adapters, which name a base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from danlu.recipe.sections import (
    AdapterOff,
    AdapterSection,
    Cached,
    DraftModel,
    Frozen,
    Model,
    ModelReward,
    QuantizationSection,
    Recipe,
    Stepwise,
)
from danlu.recipe.value import VALUE, value_adapter, value_section, value_share

if TYPE_CHECKING:
    from danlu.core.types import Role, Task

POLICY: Role = "policy"
REFERENCE: Role = "reference"
DRAFT: Role = "draft"


class Mixing(NamedTuple):
    """A model's weights become share x policy + (1 - share) x its own, each `every` steps."""

    every: int
    share: float


@dataclass(frozen=True)
class TrainedModel:
    """A model that is trained: the policy, or a model of values of its own."""

    section: Model
    adapter: AdapterSection | None = None
    """The adapter that is trained in the place of its parameters."""
    quantization: QuantizationSection | None = None
    """The storage of its frozen linear layers; None: in the type of activations."""
    task: Task | None = "causal-lm"
    """None: it classifies images."""


@dataclass(frozen=True)
class ModelSpec:
    """A frozen model of another role than the policy: where its weights are from, and how they are stored."""

    key: str  # of the section of the recipe that asks for it, for messages: "reference", "teacher.0"
    section: Model
    quantization: QuantizationSection | None = None  # of its linear layers; None: in the type of activations
    mixing: Mixing | None = None
    """The mixing by which its weights follow the policy's: they are in float32 then, and in checkpoints."""


@dataclass(frozen=True)
class PolicyWithoutAdapter:
    """The policy without the adapter that is trained: a model that has no weights of its own."""


@dataclass(frozen=True)
class CachedModel:
    """A model that gives its outputs before training, alone in memory, and takes no part in the steps."""

    model: ModelSpec | None
    """None: the policy as the run starts it, with its new adapter."""


@dataclass(frozen=True)
class ValueHead:
    """Values as a head [1, D] on the policy's last hidden states, which is trained with it."""


@dataclass(frozen=True)
class ValueAdapter:
    """Values by an adapter of their own on the policy's base, with a head [1, D]; both are trained."""

    adapter: AdapterSection | None
    """The new adapter; None: it starts as the one in `folder`."""
    folder: str | None = None


@dataclass(frozen=True)
class RewardModel:
    """A frozen model that scores answers, on the first process; upon the policy's base where its folder has an adapter
    on that.
    """

    path: str


FrozenRole = ModelSpec | PolicyWithoutAdapter | CachedModel
"""A role that the objective asks for outputs."""
RoleModel = TrainedModel | FrozenRole | ValueHead | ValueAdapter | RewardModel


def roles_of(recipe: Recipe) -> dict[Role, RoleModel]:
    """The models of a recipe's stage by role, the policy first: "policy", "value", "reference", "teacher", "teacher.1",
    .., "rewards.0", .., "draft".
    """
    roles: dict[Role, RoleModel] = {
        POLICY: TrainedModel(recipe.model, recipe.adapter, recipe.base_quantization, task_of(recipe))
    }
    if (value := _value(recipe)) is not None:
        roles[VALUE] = value
    roles |= frozen_roles(recipe)
    for number, reward in enumerate(recipe.rewards or ()):
        if isinstance(reward, ModelReward):
            roles[f"rewards.{number}"] = RewardModel(reward.path)
    draft = None if recipe.rollout is None else recipe.rollout.draft
    if isinstance(draft, DraftModel):
        roles[DRAFT] = ModelSpec("rollout.draft", Model(path=draft.model))
    return roles


def frozen_roles(recipe: Recipe) -> dict[Role, FrozenRole]:
    """The models that a stage's objective asks for outputs next to the policy: the reference, then the teachers."""
    reference = frozen_reference(recipe)
    return {**({} if reference is None else {REFERENCE: reference}), **frozen_teachers(recipe)}


def frozen_reference(recipe: Recipe) -> FrozenRole | None:
    """The reference of a recipe; None where it has none.

    A cached one is a model with the weights that the run starts from, unless the adapter that is trained starts with an
    effect: then it is the policy itself.
    """
    from danlu.recipe.reference import resolve_reference, starts_with_effect

    match resolve_reference(recipe):
        case Cached():
            alike = starts_with_effect(recipe.adapter) is None
            return CachedModel(ModelSpec(REFERENCE, recipe.model, recipe.base_quantization) if alike else None)
        case AdapterOff():
            return PolicyWithoutAdapter()
        case Frozen() as frozen:
            section = recipe.model if frozen.model is None else Model(path=frozen.model)
            mixing = None if frozen.every is None else Mixing(frozen.every, frozen.mix)
            return ModelSpec(REFERENCE, section, frozen.quantization or recipe.base_quantization, mixing)
    return None


def frozen_teachers(recipe: Recipe) -> Mapping[Role, ModelSpec | CachedModel]:
    """The teachers of a recipe by role; those that are cached give their outputs before training."""
    from danlu.recipe.teachers import teachers_of

    teachers: dict[Role, ModelSpec | CachedModel] = {}
    for number, (role, teacher) in enumerate(teachers_of(recipe).items()):
        spec = ModelSpec(f"teacher.{number}", Model(path=teacher.model), teacher.quantization)
        teachers[role] = CachedModel(spec) if teacher.cache else spec
    return teachers


def task_of(recipe: Recipe) -> Task | None:
    """The task of the model that a stage trains: a reward model of pairs scores whole answers, one of steps tokens."""
    if recipe.stage == "classify":
        return None
    if recipe.stage != "reward":
        return "causal-lm"
    is_of_steps = any(isinstance(term, Stepwise) for term in recipe.objective or ())
    return "token-classification" if is_of_steps else "sequence-classification"


def _value(recipe: Recipe) -> RoleModel | None:
    """The model of values of PPO; None where the objective has no values."""
    share = value_share(recipe)
    if share is None:
        return None
    if share == "policy":
        return ValueHead()
    section = value_section(recipe)
    if share == "base":
        return ValueAdapter(value_adapter(recipe), section.model)
    model = recipe.model if section.model is None else Model(path=section.model)
    return TrainedModel(model, task="sequence-classification")
