"""The configs of models of other roles than the policy (frozen ones, values, rewards), and their sizes. No torch.

Nothing but configs and the headers of weight files is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from danlu.assembly.base_model import find_base
from danlu.assembly.recipe_adapters import base_config
from danlu.core.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.hf_layout import SCORE
from danlu.models.presets import from_scratch
from danlu.planning.batch_shape import ELEMENT_BYTES
from danlu.recipe import Recipe
from danlu.recipe.sections import Model, ModelReward
from danlu.recipe.value import value_section

if TYPE_CHECKING:
    from danlu.inference.resolve_model import ResolvedModel


def frozen_config(section: Model, vocab_size: int) -> ModelConfig:
    """The config of a frozen model."""
    return from_scratch(section, vocab_size) if section.path is None else base_config(section)


def own_section(recipe: Recipe) -> Model:
    """The model that a separate value model starts from."""
    path = value_section(recipe).model
    if path is None:
        return recipe.model
    # Here: stages without rollouts load nothing of inference.
    from danlu.inference.resolve_model import resolve_model

    resolved = resolve_model(path, may_classify=True)
    below = [str(adapter.path) for stack in resolved.stacks for adapter in stack]
    return Model(path=str(resolved.folder), adapters=below)


def own_config(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """The config of a decoder of values: it has no head over the vocabulary."""
    return replace(frozen_config(own_section(recipe), vocab_size), task="sequence-classification")


def resolve_reward_model(path: str) -> ResolvedModel:
    """Finds the folders of a reward model, with its config, without reading its weights.

    Raises ModelError for a language model, for a folder without a model, and for a model without a head or with a head
    of more than one number for an answer.
    """
    from danlu.inference.resolve_model import resolve_model

    resolved = resolve_model(path, may_classify=True)
    if resolved.config.task == "causal-lm":
        raise ModelError(f"{resolved.given_path}: a language model, which gives no score. Name a reward model")
    _check_head(resolved)
    return resolved


def _check_head(resolved: ResolvedModel) -> None:
    """Raises ModelError for a head that is no reward's, by the headers of its files."""
    from danlu.assembly.score_head import score_head_shape  # here: most recipes have no reward model

    config, path = resolved.config, resolved.given_path
    shape = score_head_shape(resolved.folder, resolved.stacks[0] if resolved.stacks else ())
    if shape is None:
        raise ModelError(f"{path}: its config is of a model that classifies, and its weights have no {SCORE}")
    labels = 2 if config.task == "token-classification" else 1
    if shape != (labels, config.hidden_size):
        wrong = f"has {shape[0]} labels" if shape[1:] == (config.hidden_size,) else f"is {list(shape)}"
        raise ModelError(
            f"{path}: its head {wrong}. A reward is one score (sequence classification with 1 label), or that of steps "
            f"(token classification with 2), of hidden states of width {config.hidden_size}"
        )


def has_base_of_policy(recipe: Recipe, resolved: ResolvedModel) -> bool:
    """Whether a reward model is an adapter on the policy's base."""
    if recipe.adapter is None or recipe.model.path is None or len(resolved.stacks) != 1:
        return False
    return find_base(resolved.folder).fingerprint == find_base(recipe.model.path).fingerprint


def own_reward_bytes(recipe: Recipe, judges: Collection[str]) -> int:
    """Bytes of the reward models that the first process loads in addition to the policy, in the type of activations.

    judges: the paths of those that need no base of their own.
    """
    paths = {section.path for section in recipe.rewards or () if isinstance(section, ModelReward)} - set(judges)
    sizes = [resolve_reward_model(path).config.parameter_count() for path in paths]
    return sum(sizes) * ELEMENT_BYTES[recipe.activations]


def shared_rewards(recipe: Recipe) -> list[str]:
    """The paths of reward models that are adapters on the policy's base, whether or not they can judge upon that."""
    sections = [section for section in recipe.rewards or () if isinstance(section, ModelReward)]
    return [each.path for each in sections if has_base_of_policy(recipe, resolve_reward_model(each.path))]
