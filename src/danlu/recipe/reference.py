"""The reference of stages `preference` and `rl`: the recipe's, else the one that suits its adapter. No torch."""

from __future__ import annotations

from danlu.recipe.sections import (
    AdapterOff,
    AdapterSection,
    Cached,
    Continue,
    Frozen,
    LowRank,
    NoReference,
    PolicyGradientSection,
    PreferenceTerm,
    Prefix,
    Prompt,
    Recipe,
    ReferenceSection,
)

_COPIES_ARE_CUT = (
    "modules_to_save and bias put trained copies in the place of parameters, and only these copies are sharded and cut"
)


def resolve_reference(recipe: Recipe) -> ReferenceSection:
    """The reference of a recipe, none for stages without one.

    By default the policy without its adapter, where that is the model that the run starts from; else its
    log-probabilities are cached (of a stream, which is read only once, and of answers that are yet to be drawn, the
    model is kept in memory); none where no term of the objective asks for any.
    """
    if recipe.stage not in ("preference", "rl"):
        return NoReference()
    if recipe.reference is not None:
        return recipe.reference
    terms = [term for term in recipe.objective or () if isinstance(term, PreferenceTerm | PolicyGradientSection)]
    if not any(term.needs_reference for term in terms):
        return NoReference()
    if adapter_off_problem(recipe) is None:
        return AdapterOff()
    return Frozen() if recipe.data.streaming or recipe.stage == "rl" else Cached()


def starts_with_effect(adapter: AdapterSection | None) -> str | None:
    """Why the policy with its new adapter is not the model below it, before the first step; None where it is."""
    if isinstance(adapter, Prefix | Prompt):
        return f"{adapter.kind} puts virtual tokens before every document"
    if isinstance(adapter, LowRank) and adapter.init in ("pissa", "olora", "loftq"):
        return f"the adapter starts as a part of the weights ({adapter.init})"
    return None


def adapter_off_problem(recipe: Recipe) -> str | None:
    """Why the policy without the adapter that is trained cannot be the reference of a run; None where it can."""
    adapter, parallel = recipe.adapter, recipe.parallel
    if adapter is None:
        return "there is no adapter to switch off"
    if isinstance(adapter, Continue):
        return "the adapter that is trained on is a part of the model that the run starts from"
    if (reason := starts_with_effect(recipe.adapter)) is not None:
        return f"{reason}, and without it the policy is not the model that the run starts from"
    copies = bool(getattr(adapter, "modules_to_save", [])) or getattr(adapter, "bias", "none") != "none"
    if copies and (parallel.shard != "none" or parallel.tensor > 1):
        return _COPIES_ARE_CUT
    return None
