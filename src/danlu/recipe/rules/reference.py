"""Rules about the reference of stage `preference`."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.reference import adapter_off_problem, starts_with_effect
from danlu.recipe.sections import AdapterOff, Cached, Frozen, NoReference, PreferenceTerm, Prefix, Prompt, Recipe
from danlu.recipe.yaml_tree import Problem


def reference_is_consistent(recipe: Recipe) -> Iterator[Problem]:
    """A reference is what the terms compare with, and what the run can have."""
    reference = recipe.reference
    if reference is None:
        return
    if recipe.stage != "preference":
        message = f"only stage preference has a reference; this is {recipe.stage}. Leave it out"
        yield Problem("reference", message, reads=("stage",))
        return
    match reference:
        case NoReference():
            yield from _needed_by_terms(recipe)
        case AdapterOff():
            if (reason := adapter_off_problem(recipe)) is not None:
                message = f"adapter-off: {reason}. Use reference: cached, or frozen"
                yield Problem("reference.kind", message, reads=("adapter", "parallel"))
        case Cached():
            if recipe.data.streaming:
                message = "cached: a stream is read only once, while training. Use frozen, or data.streaming: false"
                yield Problem("reference.kind", message, reads=("data.streaming",))
        case Frozen():
            yield from _frozen_is_possible(recipe, reference)


def _needed_by_terms(recipe: Recipe) -> Iterator[Problem]:
    for index, term in enumerate(recipe.objective or ()):
        if isinstance(term, PreferenceTerm) and term.needs_reference and not term.reference_free:
            message = (
                f"none, but objective.{index} ({term.kind}) compares the policy with one. Use cached, or leave it out"
            )
            yield Problem("reference.kind", message, reads=(f"objective.{index}.kind",))


def _frozen_is_possible(recipe: Recipe, reference: Frozen) -> Iterator[Problem]:
    if isinstance(recipe.adapter, Prefix | Prompt):
        message = f"frozen: {starts_with_effect(recipe)}, which a second model does not know. Use cached"
        yield Problem("reference.kind", message, reads=("adapter.kind",))
    if reference.every is None:
        if reference.mix != type(reference).model_fields["mix"].get_default():
            yield Problem("reference.mix", "only read with reference.every", reads=("reference.every",))
        return
    moving = "a moving reference is mixed from all weights of the policy"
    if recipe.adapter is not None:
        message = f"{moving}, and of an adapter only its own are trained. Leave out every, or train the whole model"
        yield Problem("reference.every", message, reads=("adapter",))
    elif reference.quantization is not None:
        yield Problem("reference.every", f"{moving}, so it cannot be quantized", reads=("reference.quantization",))
    elif reference.model is not None:
        message = f"{moving}, so it starts as the same model. Leave out reference.model or every"
        yield Problem("reference.every", message, reads=("reference.model",))
    if "parameters" in recipe.memory.offload:
        yield Problem("reference.every", f"{moving}, and stays in memory", reads=("memory.offload",))
