"""The models of a recipe, read from their configs and from the headers of weight files. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.assembly.policy_tensors import policy_tensors_of
from danlu.assembly.recipe_adapters import base_config
from danlu.assembly.stored_base import stored_base
from danlu.models.config import ModelConfig
from danlu.planning.lengths import FULL_PACKS, Lengths
from danlu.planning.model_tensors import UNSTORED, frozen_tensors
from danlu.planning.workload import FrozenModel, OtherModel, Workload
from danlu.recipe import Recipe
from danlu.recipe.roles import DRAFT, CachedModel, ModelSpec, RewardModel, TrainedModel, frozen_roles, roles_of
from danlu.recipe.value import VALUE, value_share
from danlu.stages.role_configs import own_config, own_reward_bytes, own_section, resolve_reward_model, shared_rewards


def read_workload(recipe: Recipe, config: ModelConfig, lengths: Lengths = FULL_PACKS, *, judges: bool) -> Workload:
    """Reads the workload of a recipe.

    config: the policy's. judges: whether reward models upon the policy's base share its weights. Raises ModelError for
    a model that cannot be read, and RecipeError for an adapter that does not fit it.
    """
    frozen = []
    for role, spec in frozen_roles(recipe).items():
        if not isinstance(spec, ModelSpec):
            continue
        own = config if spec.section.path is None else base_config(spec.section)
        in_float32 = spec.mixing is not None
        # Adapters that are merged into a model leave it dense; see `stages.frozen_models`.
        is_dense = in_float32 or (bool(spec.section.adapters) and recipe.adapter is None)
        stored = UNSTORED if is_dense else stored_base(spec.section, own)
        tensors = frozen_tensors(own, recipe.activations, spec.quantization, in_float32=in_float32, stored=stored)
        frozen.append(FrozenModel(role, own, tensors))
    return Workload(
        recipe,
        config,
        policy_tensors_of(recipe, config),
        tuple(frozen),
        critic=own_config(recipe, config.vocab_size) if value_share(recipe) == "none" else None,
        others=tuple(_others(recipe)),
        reward_bytes=own_reward_bytes(recipe, shared_rewards(recipe) if judges else ()),
        reward_models=tuple(
            (role, resolve_reward_model(model.path).config)
            for role, model in roles_of(recipe).items()
            if isinstance(model, RewardModel)
        ),
        lengths=lengths,
    )


def _others(recipe: Recipe) -> Iterator[OtherModel]:
    """Yields the models of other folders than the policy's that are divided among processes."""
    for role, model in roles_of(recipe).items():
        spec = model.model if isinstance(model, CachedModel) else model
        if role == VALUE and isinstance(spec, TrainedModel):
            spec = ModelSpec(VALUE, own_section(recipe))
        if role == DRAFT or not isinstance(spec, ModelSpec):
            continue
        path = spec.section.path
        if path is not None and path != recipe.model.path:
            yield OtherModel(f"{spec.key}.model", path, base_config(spec.section))
