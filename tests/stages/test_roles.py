"""The roles that a recipe has without torch are the models that its stage builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.placed_decoder import placed_of
from builders.tiny_world import World
from test_rl_runs import recipe_file

from danlu.assembly.parameters import role_of
from danlu.recipe import Recipe, load
from danlu.recipe.roles import (
    POLICY,
    CachedModel,
    ModelSpec,
    PolicyWithoutAdapter,
    TrainedModel,
    ValueAdapter,
    ValueHead,
    frozen_roles,
    roles_of,
)
from danlu.recipe.value import VALUE
from danlu.stages.placed import PlacedDecoder
from danlu.stages.protocols import FromColumns
from danlu.stages.table import STAGES

PAIRS: dict[str, dict[str, Any]] = {
    "cached": {"reference": "cached"},
    "frozen": {"reference": "frozen"},
    "moving": {"reference": {"kind": "frozen", "every": 2, "mix": 0.5}},
    "adapter off": {"adapter": "lora"},
    "beside a packed base": {"adapter": "lora", "quantization": "nf4", "reference": "frozen"},
    "none": {"stage": "orpo"},
}
VALUES: dict[str, dict[str, Any]] = {
    "head": {},
    "base": {"adapter": "lora", "value": {"share": "base", "adapter": {"kind": "lora", "rank": 3}}},
    "own": {"value": "none"},
    "own beside an adapter": {"adapter": "lora", "value": "none"},
}


def of_pairs(world: World, folder: Path, changes: dict[str, Any]) -> Recipe:
    rows = folder.with_name("pairs.jsonl")
    rows.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    values = {"stage": "dpo", "model": {"path": str(world.base)}, "data": {"train": str(rows)}, "steps": 1, **changes}
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(yaml.safe_dump({**values, "output": str(folder), "precision": "fp32"}))
    return load(file).recipe


def described(placed: PlacedDecoder) -> dict[str, Any]:
    """What a stage has built, in the words of roles: the kind of each, whether it is packed, what is trained."""
    trained = [name for name, parameter in placed.parameters() if parameter.requires_grad]
    built: dict[str, Any] = {POLICY: ("adapter" if placed.adapters else "model", packed(placed.model))}
    if placed.own_critic is not None:
        built[VALUE] = ("model", packed(placed.own_critic.subject.model))
    elif any(VALUE in name.split(".") for name in trained):
        built[VALUE] = "adapter"
    elif any(role_of(name) == VALUE for name in trained):
        built[VALUE] = "head"
    for role, spec in placed.beside.items():
        if role in placed.frozen:
            built[role] = ("frozen", packed(placed.frozen[role].subject.model), role in placed.moving)
        else:
            built[role] = "columns" if isinstance(spec, FromColumns) else "policy without adapter"
    return built


def packed(model: Any) -> bool:
    return any(getattr(module, "quantized", None) is not None for module in model.modules())


def told(recipe: Recipe) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for role, model in roles_of(recipe).items():
        match model:
            case TrainedModel():
                words[role] = ("model" if model.adapter is None else "adapter", model.quantization is not None)
            case ModelSpec():
                words[role] = ("frozen", model.quantization is not None, model.mixing is not None)
            case ValueAdapter():
                words[role] = "adapter"
            case ValueHead():
                words[role] = "head"
            case CachedModel():
                words[role] = "columns"
            case PolicyWithoutAdapter():
                words[role] = "policy without adapter"
    return words


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_have_the_roles_that_are_built(tiny_world: World, tmp_path: Path, name: str) -> None:
    recipe = of_pairs(tiny_world, tmp_path / "run", PAIRS[name])
    built = described(placed_of(recipe))
    assert built == told(recipe)
    columns = {column.name: column.model for column in STAGES[recipe.stage].columns(recipe)}
    assert columns == {
        role: model.model for role, model in frozen_roles(recipe).items() if isinstance(model, CachedModel)
    }
    other = of_pairs(tiny_world, tmp_path / "other", PAIRS["frozen" if name == "none" else "none"])
    assert told(other) != built  # control


@pytest.mark.parametrize("name", VALUES)
def test_ppo_has_the_values_that_are_built(tiny_world: World, tmp_path: Path, name: str) -> None:
    recipe = load(recipe_file(tiny_world, tmp_path / "run", stage="ppo", **VALUES[name])).recipe
    assert described(placed_of(recipe)) == told(recipe)
