"""PPO's model of values in a verification: a small one in its place, or a small adapter on the small base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from danlu.assembly.parameters import VALUE
from danlu.models.config import ModelConfig
from danlu.recipe import Recipe
from danlu.recipe.value import value_adapter, value_share
from danlu.verification.proxy_adapters import proxy_adapter_folders, proxy_section
from danlu.verification.role_proxies import write_model

_MOST_WARMUP = 1  # steps at most, so that the policy moves in a verification


def proxy_value(
    recipe: Recipe, config: ModelConfig, small: ModelConfig, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Returns (changes of the recipe, notes).

    config, small: of the large policy and of the small one, which is in `folder`. Where the recipe names the start of
    the value model, a small one is written there: an adapter of the same kind, or a model with the policy's sizes.
    """
    section, share = recipe.value, value_share(recipe)
    if section is None or share in (None, "policy"):
        return {}, []
    changes: dict[str, Any] = {}
    notes = []
    if section.warmup > _MOST_WARMUP:
        changes["warmup"] = _MOST_WARMUP
        notes.append(f"the policy is held for {_MOST_WARMUP} step, not {section.warmup}")
    if section.adapter is not None:
        own = value_adapter(recipe)
        changes["adapter"] = None if own is None else proxy_section(own, config, small)
    if section.model is not None and share == "base":
        (changes["model"],), kind = proxy_adapter_folders(
            [section.model], config, folder / "model", folder / VALUE, seed=recipe.seed + 2
        )
        notes.append(f"values start from a {kind} adapter with numbers of its own")
    elif section.model is not None:
        write_model(small, folder / VALUE, recipe.seed + 2)
        changes["model"] = str(folder / VALUE)
        notes.append("values start from another small model than the policy")
    return {"value": section.model_copy(update=changes)}, notes
