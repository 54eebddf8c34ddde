"""The initial weights of PPO's value model: checked, placed, and its head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from danlu.adapters.adapter_config import adapter_stack
from danlu.assembly.adapter_training import value_on_base
from danlu.assembly.base_model import weight_layouts
from danlu.assembly.parallelize import Placed, place, subject_of
from danlu.assembly.parameters import own_name, role_of
from danlu.assembly.recipe_adapters import model_folder
from danlu.assembly.score_head import score_head_shape
from danlu.core.errors import ModelError, RecipeError
from danlu.inference.resolve_model import resolve_model
from danlu.models.config import ModelConfig
from danlu.models.hf_config import architecture_of
from danlu.models.hf_folder import check_headers
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.roles import ModelSpec
from danlu.recipe.sections import Model
from danlu.recipe.value import VALUE, value_section, value_share
from danlu.stages.frozen_models import check_frozen_model
from danlu.stages.reward import first_score_head
from danlu.stages.role_configs import frozen_config, own_config, own_section
from danlu.training.trained_roles import TrainedRoles


def check_critic(recipe: Recipe) -> None:
    """Raises a DanluError for faults in the critic of a recipe, without reading its matrices."""
    saves_value_model = value_section(recipe).save
    match value_share(recipe):
        case "policy":
            _check_head_of_policy(recipe)
            if saves_value_model and recipe.adapter is None:
                _check_class_for_scores(frozen_config(recipe.model, 1))
        case "base":
            value_on_base(recipe)
        case "none":
            section = own_section(recipe)
            check_frozen_model(ModelSpec(VALUE, section), recipe)
            if saves_value_model:
                _check_class_for_scores(frozen_config(section, 1))
            if section.path is not None:
                folder = model_folder(section)
                check_headers(folder, own_config(recipe, 1), quantized=False, layouts=weight_layouts(folder))


def _check_class_for_scores(config: ModelConfig) -> None:
    """Raises RecipeError for a model of values that could be trained but not be kept."""
    try:
        architecture_of(config.family, "sequence-classification")
    except ModelError as error:
        raise RecipeError(f"value.save: {error}") from None


def _check_head_of_policy(recipe: Recipe) -> None:
    """Raises a DanluError where the head that values begin with on the policy is none, or of another width."""
    path = value_section(recipe).model
    if path is None:
        return
    resolved = resolve_model(path, may_classify=True)
    shape = score_head_shape(resolved.folder, resolved.stacks[0] if resolved.stacks else ())
    if shape is None:
        raise RecipeError(f"value.model: {path} has no score head, and with share: policy nothing else of it is read")
    width = frozen_config(recipe.model, 1).hidden_size
    if shape[-1] != width:
        raise RecipeError(
            f"value.model: the score head of {path} is one of hidden states of width {shape[-1]}, and the policy's are "
            f"of width {width}. Name one that was trained on this model, or use share: none"
        )


def place_own_critic(recipe: Recipe, vocab_size: int, ranks: Ranks, device: torch.device, *, resumed: bool) -> Placed:
    """A decoder of values on the processes of a layout, placed as a policy without adapters is.

    vocab_size: of the tokenizer, for a model from scratch. resumed: weights will be read from a checkpoint.
    """
    alike = recipe.model_copy(update={"model": own_section(recipe), "adapter": None, "quantization": None})
    subject = subject_of(alike, own_config(recipe, vocab_size), device, resumed=resumed, ranks=ranks)
    return place(subject, alike, ranks, device, resumed=resumed)


def first_value_head(recipe: Recipe) -> nn.Linear:
    """The head [1, D] that values begin with: that of the model they start from, or one drawn by the seed.

    Raises ModelError for folders that cannot be read, RecipeError for a head of more labels.
    """
    section, path = recipe.model, value_section(recipe).model
    if path is not None and value_share(recipe) == "base":
        below = [str(adapter.path) for adapter in adapter_stack(path)]
        section = Model(path=recipe.model.path, adapters=below)
    elif path is not None:
        section = own_section(recipe)
    key = "model.path" if path is None else "value.model"
    return first_score_head(section, 1, bias=False, seed=recipe.seed, key=key, named=path)


def with_own_critic(parallel: ParallelContext, critic: Placed) -> ParallelContext:
    """The policy's part in a step, with that of a decoder of values that is placed like it."""
    own = critic.parallel

    def prepare_backward(is_last: bool, chunk: int) -> None:
        parallel.prepare_backward(is_last, chunk)
        own.prepare_backward(is_last, chunk)

    def finish_weight_pass(is_last: bool, chunk: int) -> None:
        parallel.finish_weight_pass(is_last, chunk)
        own.finish_weight_pass(is_last, chunk)

    def reshard() -> None:
        parallel.reshard()
        own.reshard()

    local = {
        own_name(name): replace(parameter, name=own_name(name)) for name, parameter in own.local_parameters.items()
    }
    elsewhere = {own_name(name): replace(each, name=own_name(name)) for name, each in own.elsewhere.items()}
    return replace(
        parallel,
        local_parameters={**parallel.local_parameters, **local},
        elsewhere={**parallel.elsewhere, **elsewhere},
        chunk_of={**parallel.chunk_of, **{own_name(name): chunk for name, chunk in own.chunk_of.items()}},
        partial_gradients=(
            *parallel.partial_gradients,
            *((group, own_name(name)) for group, name in own.partial_gradients),
        ),
        prepare_backward=prepare_backward,
        finish_weight_pass=finish_weight_pass,
        reshard=reshard,
    )


def trained_roles(recipe: Recipe) -> TrainedRoles | None:
    """Policy and critic as models that are clipped apart; None where values are a head on the policy."""
    if value_share(recipe) not in ("base", "none"):
        return None
    return TrainedRoles(role_of, {"policy": value_section(recipe).warmup}, ("policy", VALUE))
