"""The optimizer of a recipe over the parameters of a placed model: rates by role, and the place of its state."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from danlu.assembly.parameters import role_of
from danlu.memory.pages import paged_state
from danlu.optim.build import Optimizers, build
from danlu.recipe import Recipe
from danlu.recipe.value import VALUE, value_adapter


def optimizer_of(
    parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe, device: torch.device, *, objective_rate: float = 1.0
) -> Optimizers:
    """Builds the optimizer of a recipe over this process's part of the parameters, its state placed as in `memory`.

    objective_rate: factor on the learning rate of the objective's own parameters and of a value model.
    """
    memory = recipe.memory
    # LoRA+: what B's rate is multiplied by.
    ratio, values_ratio = (getattr(adapter, "rate_ratio", 1.0) for adapter in (recipe.adapter, value_adapter(recipe)))

    def rate_of(name: str) -> float:
        is_of_values = role_of(name) == VALUE
        own = objective_rate if is_of_values or name.startswith("objective.") else 1.0
        if name.endswith("lora_B"):
            own *= float(values_ratio if is_of_values else ratio)
        return own

    # The folder of the state is that of `memory`, unless the optimizer has one of its own.
    own_folder = getattr(recipe.optimizer, "folder", None)
    in_memorys = own_folder is None and memory.folder is not None and "optimizer" in memory.offload

    return build(
        parameters,
        recipe.optimizer,
        rate_of=None if ratio == values_ratio == objective_rate == 1 else rate_of,
        offload="optimizer" in memory.offload and (device.type == "cuda" or memory.folder is not None),
        folder=memory.folder,
        paged_state=partial(paged_state, field="memory.folder" if in_memorys else "optimizer.folder"),
    )
