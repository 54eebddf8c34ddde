"""Rules about the model of values of stage `rl` with objective ppo."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.reference import starts_with_effect
from danlu.recipe.sections import AdapterSection, Continue, Dora, LowRank, Prefix, Prompt, Recipe, Value
from danlu.recipe.yaml_tree import Problem


def values_have_a_model(value: Value, recipe: Recipe) -> Iterator[Problem]:
    """The model of values is one that the run can have."""
    if value.learning_rate is not None and recipe.optimizer.learning_rate == 0:
        message = "is reached as a multiple of optimizer.learning_rate, which is 0. Give that a value above 0"
        yield Problem("value.learning_rate", message, reads=("optimizer.learning_rate",))
    if value.share == "policy":
        return
    if recipe.steps is not None and value.warmup >= recipe.steps:
        message = f"the policy is held for {value.warmup} steps, and there are {recipe.steps}. Lower it, or raise steps"
        yield Problem("value.warmup", message, reads=("steps",))
    if value.share == "base":
        yield from _base_is_shared(recipe, value)
    elif value.adapter is not None:
        message = "share: none trains a model of its own as a whole. Leave it out, or set share: base"
        yield Problem("value.adapter", message, reads=("value.share",))
    elif "parameters" in recipe.memory.offload:
        message = "parameters: a model of values of its own stays in memory. Leave it out, or set value.share: base"
        yield Problem("memory.offload", message, reads=("value.share",))


def _base_is_shared(recipe: Recipe, value: Value) -> Iterator[Problem]:
    policy, own = recipe.adapter, value.adapter
    if policy is None:
        message = "base: the policy trains all of the model, so there is no frozen base. Give adapter, or use none"
        yield Problem("value.share", message, reads=("adapter",))
        return
    if (reason := _cannot_be_switched(policy)) is not None:
        message = f"base: adapter: {reason}. Leave that out, or set value.share: none"
        yield Problem("value.share", message, reads=("adapter",))
    if own is None:
        return
    reads = ("value.share", "adapter", "model.adapters")
    if value.model is not None:
        message = "not read with value.model, the folder of an adapter that says what it is. Leave it out"
        yield Problem("value.adapter", message, reads=("value.model",))
    if isinstance(own, Continue):
        message = "continue: the last of model.adapters is the policy's. Name another adapter with value.model"
        yield Problem("value.adapter.kind", message, reads=reads)
    elif (reason := _cannot_be_switched(own)) is not None:
        yield Problem("value.adapter", f"{reason}. Leave that out", reads=reads)
    elif isinstance(own, LowRank) and own.init in ("pissa", "olora", "loftq"):
        message = f"{own.init} takes its start out of the base, which the policy has too. Use default or gaussian"
        yield Problem("value.adapter.init", message, reads=reads)
    elif isinstance(own, Dora) and (recipe.model.adapters or starts_with_effect(recipe.adapter) is not None):
        message = "dora scales the weights themselves, and here other adapters lie below. Use kind: lora"
        yield Problem("value.adapter.kind", message, reads=reads)


def _cannot_be_switched(adapter: AdapterSection) -> str | None:
    """Why an adapter cannot take turns with another in one pass that has a gradient; None where it can."""
    if isinstance(adapter, Prefix | Prompt):
        return f"{adapter.kind} puts virtual tokens before every document, and one batch goes through both models"
    if getattr(adapter, "modules_to_save", []):
        return "modules_to_save puts trained copies in the place of weights that both models read"
    if getattr(adapter, "bias", "none") != "none":
        return "bias puts trained copies in the place of biases that both models read"
    return None
