"""Rules about the reference of stages `preference` and `rl`."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.reference import adapter_off_problem, resolve_reference, starts_with_effect
from danlu.recipe.sections import AdapterOff, Cached, Frozen, NoReference, PreferenceTerm, Prefix, Prompt, Recipe
from danlu.recipe.yaml_tree import Problem


def reference_is_consistent(recipe: Recipe) -> Iterator[Problem]:
    """Checks that a reference is one that the objective compares with and that the run can have."""
    reference = recipe.reference
    if recipe.stage == "rl":
        yield from _suits_answers_to_come(recipe)
    match reference:
        case NoReference():
            for index, term in enumerate(recipe.objective or ()):
                if isinstance(term, PreferenceTerm) and term.needs_reference and not term.reference_free:
                    term_key = f"objective.{index}"
                    message = (
                        f"none, but {term_key} ({term.kind}) compares the policy with one. Use cached, or leave it out"
                    )
                    yield Problem("reference.kind", message, reads=(f"{term_key}.kind",))
        case AdapterOff():
            if (reason := adapter_off_problem(recipe)) is not None:
                others = "frozen" if recipe.stage == "rl" else "cached, or frozen"
                message = f"adapter-off: {reason}. Use reference: {others}"
                yield Problem("reference.kind", message, reads=("adapter", "parallel"))
        case Cached():
            if recipe.data.streaming:
                message = "cached: a stream is read only once, while training. Use frozen, or data.streaming: false"
                yield Problem("reference.kind", message, reads=("data.streaming",))
        case Frozen():
            yield from _frozen_is_possible(recipe, reference)


def _suits_answers_to_come(recipe: Recipe) -> Iterator[Problem]:
    """Stage rl has a reference where it has a KL, and one that can be asked while training."""
    objective, reference = recipe.policy_gradient, recipe.reference
    if objective is None:
        yield from _suits_pairs_to_come(recipe)
        return
    reads = ("objective", "objective.0.kl")
    if not objective.needs_reference:
        if reference is not None and not isinstance(reference, NoReference):
            message = "objective.0.kl is 0, and nothing else is compared with a reference. Leave it out, or give kl"
            yield Problem("reference", message, reads=reads)
    elif isinstance(reference, NoReference):
        message = "none, but objective.0.kl holds the policy to one. Leave it out, or set kl: null"
        yield Problem("reference.kind", message, reads=reads)
    elif isinstance(reference, Cached):
        message = "cached: answers are drawn while training, so nothing is known of them before. Use frozen"
        yield Problem("reference.kind", message, reads=("stage",))
    elif isinstance(resolve_reference(recipe), Frozen) and isinstance(recipe.adapter, Prefix | Prompt):
        message = (
            f"{starts_with_effect(recipe.adapter)}, which a frozen reference does not know. Use adapter: lora, or set "
            "objective.kl: null"
        )
        yield Problem("adapter.kind", message, reads=reads)


def _suits_pairs_to_come(recipe: Recipe) -> Iterator[Problem]:
    """The reference of terms over pairs of answers can be asked while training."""
    terms = [term for term in recipe.objective or () if isinstance(term, PreferenceTerm)]
    if isinstance(recipe.reference, Cached):
        message = "cached: answers are drawn while training, so nothing is known of them before. Use frozen"
        yield Problem("reference.kind", message, reads=("stage",))
    elif recipe.reference is not None and not any(term.needs_reference for term in terms):
        message = f"{terms[0].kind} compares the policy with nothing. Leave it out" if terms else "not read"
        yield Problem("reference", message, reads=("objective",))
    elif isinstance(resolve_reference(recipe), Frozen) and isinstance(recipe.adapter, Prefix | Prompt):
        message = f"{starts_with_effect(recipe.adapter)}, which a frozen reference does not know. Use adapter: lora"
        yield Problem("adapter.kind", message, reads=("objective",))


def _frozen_is_possible(recipe: Recipe, reference: Frozen) -> Iterator[Problem]:
    if isinstance(recipe.adapter, Prefix | Prompt) and recipe.stage == "preference":
        message = f"frozen: {starts_with_effect(recipe.adapter)}, which a second model does not know. Use cached"
        yield Problem("reference.kind", message, reads=("adapter.kind",))
    if reference.every is None:
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
