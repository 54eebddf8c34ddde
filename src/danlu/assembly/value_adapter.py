"""The adapter that PPO's model of values is on the policy's frozen base: a new one, or one that a run has trained."""

from __future__ import annotations

from danlu.adapters.adapter_config import AdapterFolder, adapter_stack, open_adapter
from danlu.adapters.adapter_set import AdapterSet
from danlu.assembly.base_model import check_base, find_base, rotated_by
from danlu.assembly.parameter_roles import VALUE
from danlu.assembly.recipe_adapters import named_stack, take_last
from danlu.core.errors import RecipeError
from danlu.models.hf_folder import read_config
from danlu.models.rotation import same_rotation
from danlu.recipe import Recipe
from danlu.recipe.sections import AdapterSection, Continue
from danlu.recipe.value import value_adapter, value_section, value_share


def value_on_base(recipe: Recipe) -> AdapterSection | AdapterFolder | None:
    """The section of a new adapter, or the folder of the one it starts as; None where there is none.

    Raises ModelError for a folder that is no adapter, or of another base; RecipeError for one that was trained upon
    other adapters than the policy's lies upon.
    """
    if value_share(recipe) != "base":
        return None
    path = value_section(recipe).model
    if path is None:
        return value_adapter(recipe)
    *below, folder = adapter_stack(path)
    folder = open_adapter(folder.path)
    assert recipe.model.path is not None, "the recipe's rules ask for a base"
    base = find_base(recipe.model.path)
    check_base(folder, base)
    policys = named_stack(recipe.model.adapters)
    if isinstance(recipe.adapter, Continue):
        take_last(policys, recipe.model.adapters)
    if [each.path.resolve() for each in below] != [each.path.resolve() for each in policys]:
        wants, has = (", ".join(str(each.path) for each in stack) or "the bare base" for stack in (below, policys))
        raise RecipeError(
            f"value.model: {path} was trained upon {wants}, and the policy's adapter lies upon {has}. Use share: none, "
            "or an adapter that was trained upon the same"
        )
    config = read_config(base.folder)
    rotated = [rotated_by(config, stack) for stack in ([*below, folder], named_stack(recipe.model.adapters))]
    if not same_rotation(*rotated):
        raise RecipeError(
            f"value.model: {path} was trained with another rotary embedding of the base (long_context) than the "
            "policy's adapter, and both are on one base. Use share: none"
        )
    return folder


def check_value_adapter(adapters: AdapterSet) -> None:
    """Raises RecipeError for an adapter of values, in the model, that cannot take turns with the policy's."""
    added = adapters.added[VALUE]
    reason = None
    if added.copies:
        reason = "has trained copies of parameters of the base (modules_to_save or bias)"
    elif added.virtual_tokens():
        reason = "puts virtual tokens before every document"
    elif added.base_changing_sites():
        reason = f"took its start out of the base ({added.section.init})"
    if reason is not None:
        raise RecipeError(f"value.model: the adapter there {reason}, and both models read that base. Use share: none")
