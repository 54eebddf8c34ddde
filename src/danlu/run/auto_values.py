"""Values that a recipe leaves open and a run decides when it begins.

That is `precision: auto`, the date in a chat template, the reference of preferences, and LongRoPE's factors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from danlu.planning.product_peak import fastest, in_gflops, product_speeds
from danlu.recipe import Loaded, Recipe
from danlu.recipe.reference import resolve_reference
from danlu.recipe.sections import value_at
from danlu.recipe.stage_defaults import former_values, stage_of, with_values
from danlu.stages.reader import written_date
from danlu.training.run_folder import resumed_run, run_recipe

FORMER_KL = {"in": "loss", "estimator": "k3"}
"""The former default of each key of `objective.kl`: also in the reward, and for ppo."""


def with_auto_values(
    loaded: Loaded,
    folder: Path,
    resume: str,
    device: torch.device,
    log: Callable[[str], None],
    stream: TextIO,
    *,
    dry: bool,
) -> Recipe:
    """The recipe with a value for each `auto`: that of the run that is resumed, or one that is chosen now.

    dry: nothing is searched that takes long.
    """
    run = resumed_run(folder, resume)
    saved = None if run is None else run_recipe(run)
    recipe = loaded.recipe if saved is None else with_former_defaults(loaded, saved, log)
    recipe = with_precision(recipe, saved, device, log)
    recipe = with_date(recipe, saved, log)
    recipe = with_reference(recipe, saved, log)
    return with_factors(recipe, saved, folder, device, log, stream, dry=dry)


def with_former_defaults(loaded: Loaded, saved: Recipe, log: Callable[[str], None]) -> Recipe:
    """The recipe, with the defaults of the run that is resumed where that began with others than there are now.

    A key that the user writes keeps its value, and one that the run's recipe had otherwise than by default is compared
    as every other key is.
    """
    recipe, candidates = loaded.recipe, dict[str, Any]()
    if saved.optimizer.kind == recipe.optimizer.kind:
        candidates |= former_values(stage_of(saved), saved.optimizer.kind)
    if all(each.policy_gradient is not None and each.policy_gradient.kl is not None for each in (saved, recipe)):
        candidates |= {f"objective.0.kl.{name}": value for name, value in FORMER_KL.items()}
    former = {
        key: value
        for key, value in candidates.items()
        if not loaded.is_written(key) and value_at(saved, key) == value != value_at(recipe, key)
    }
    if not former:
        return recipe
    kept = ", ".join(f"{key}: {value}" for key, value in former.items())
    log(f"{kept}: as when the run began, although the stage has other defaults now")
    return with_values(recipe, former)


def with_precision(recipe: Recipe, saved: Recipe | None, device: torch.device, log: Callable[[str], None]) -> Recipe:
    """The recipe with `precision: auto` decided: as the run that is resumed had it, else by measuring."""
    if recipe.activations != "auto":
        return recipe
    if saved is not None:
        chosen = saved.activations
        log(f"precision: auto stays {chosen}, as when the run began")
    else:
        speeds = product_speeds(device)
        chosen = fastest(speeds)
        log(f"precision: auto takes {chosen} on this machine: {in_gflops(speeds, *speeds)}")
    return recipe.model_copy(update={"precision": chosen})


def with_date(recipe: Recipe, saved: Recipe | None, log: Callable[[str], None]) -> Recipe:
    """The recipe with the day that its chat template writes, where it writes one: the resumed run's, else today's."""
    if (date := written_date(recipe)) is None:
        return recipe
    given = recipe.model.chat_template_date
    if given is None and saved is not None:
        saved_date = saved.model.chat_template_date
        if saved_date is None:
            log(f"the chat template writes the date, and the run does not say which: {date} from here on")
            return recipe
        date = saved_date
    since = "when the run began" if given is None else "model.chat_template_date"
    log(f"the chat template writes the date: {date} ({since}) in all of this run")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"chat_template_date": date})})


def with_reference(recipe: Recipe, saved: Recipe | None, log: Callable[[str], None]) -> Recipe:
    """The recipe with the reference of its preferences, where it says none: the resumed run's, else the default."""
    if recipe.stage != "preference" or recipe.reference is not None:
        return recipe
    chosen, since = None if saved is None else saved.reference, "as when the run began"
    if chosen is None:
        chosen, since = resolve_reference(recipe), "by default"
    log(f"reference: {chosen.kind}, {since}")
    return recipe.model_copy(update={"reference": chosen})


def with_factors(
    recipe: Recipe,
    saved: Recipe | None,
    folder: Path,
    device: torch.device,
    log: Callable[[str], None],
    stream: TextIO,
    *,
    dry: bool,
) -> Recipe:
    """The recipe with LongRoPE's factors, where it asks to search them: the resumed run's, else searched now.

    dry: nothing is searched; the factors of linear scaling stand in their place.
    """
    section = recipe.long_context
    if section is None or section.search is None or section.long_factor is not None:
        return recipe
    if saved is not None and saved.long_context is not None:
        factors = saved.long_context.long_factor
    elif dry:
        log("long_context.search: a dry run searches nothing, and takes the factors of linear scaling")
        return recipe
    else:
        from danlu.stages.longrope_search import searched_factors, summary

        factors = searched_factors(recipe, folder, device, stream)
        log(summary(folder))
    return recipe.model_copy(update={"long_context": section.model_copy(update={"long_factor": factors})})
