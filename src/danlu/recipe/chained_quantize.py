"""Stage quantize as a link of a chain: the keys that it shares with stages that train, and what goes before and behind.

No other file of a chain imports this one unless a stage quantizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

from danlu.recipe.overrides import Override
from danlu.recipe.quantize_recipe import complete
from danlu.recipe.sections import Frozen, QaLora, Recipe
from danlu.recipe.sections.quantizing import FIXED_FORMATS, QuantizeRecipe
from danlu.recipe.yaml_tree import Node, Problem

SHARED_KEYS = ("device", "threads", "seed")
"""Keys next to `stages` that recipes of both kinds have, with the same meaning."""
_CACHE = ("data", "cache")
"""The shared key that is `calibration.cache` here."""


def tree_of(
    shared: Node, own: Node, general: Sequence[Override], of_stage: Sequence[Override], problems: list[Problem]
) -> Node:
    """The recipe of a stage in full form.

    shared: the keys next to `stages`, of which those that only train models are left out. own: those of the stage.
    general, of_stage: overrides of all stages, and of this one.
    """
    assert isinstance(shared.value, dict) and isinstance(own.value, dict), "recipes are mappings"
    taken = {key: deepcopy(node) for key, node in shared.value.items() if key in SHARED_KEYS}
    tree = Node({**taken, **own.value}, own.origin)
    complete(tree, [*(each for each in general if each.parts[0] in SHARED_KEYS), *of_stage], problems)
    calibration = tree.child("calibration")
    caches = [each.value for each in general if each.parts == _CACHE]
    cache, is_written = shared.nearest(".".join(_CACHE))
    if calibration is not None and isinstance(calibration.value, dict) and (caches or is_written):
        calibration.value.setdefault("cache", deepcopy(caches[-1] if caches else cache))
    return tree


def is_key(name: str) -> bool:
    """Whether a recipe that quantizes has a key of this name."""
    return name in QuantizeRecipe.model_fields


def start_problem(name: str, earlier: Recipe | QuantizeRecipe | None) -> str | None:
    """Why the result of stage `name` cannot be quantized, with the remedy; None where it can, or the stage is wrong."""
    if isinstance(earlier, QuantizeRecipe):
        return f"stage {name!r} has rounded its weights already; start from the one that it was made from"
    if earlier is None:
        return None
    if earlier.adapter is not None:
        return (
            f"stage {name!r} trains an adapter, and a whole model is quantized. Train without one, or merge it with "
            "`danlu merge` and quantize that folder with a recipe of its own. Adapters go behind: on the codes"
        )
    if earlier.stage in ("reward", "classify"):
        return f"stage {name!r} trains no language model, which alone is quantized. Name another stage"
    return None


def problems_behind(recipe: Recipe, quantized: Mapping[str, tuple[str, QuantizeRecipe]]) -> Iterator[Problem]:
    """Yields what a recipe asks of models that earlier stages have quantized, and codes do not have.

    quantized: (name, recipe) of these stages by their folders.
    """
    starts = [("quantization", recipe.model.path, recipe.quantization)]
    if isinstance(recipe.reference, Frozen):
        starts.append(("reference.quantization", recipe.reference.model, recipe.reference.quantization))
    for index, teacher in enumerate(recipe.teacher or ()):
        starts.append((f"teacher.{index}.quantization", teacher.model, teacher.quantization))
    for key, path, section in starts:
        name, source = quantized.get(path or "", ("", None))
        if section is not None and source is not None and source.export not in ("dense", "fp8"):
            message = f"stage {name!r} writes codes (export: {source.export}), which stay as they are. Leave it out"
            yield Problem(key, message, None)
    name, source = quantized.get(recipe.model.path or "", ("", None))
    if source is None or source.export in ("dense", *FIXED_FORMATS) or not isinstance(recipe.adapter, QaLora):
        return
    group = source.rounding.group
    if not group or recipe.adapter.group % group:
        has = f"groups of {group}" if group else "one scale for a whole row"
        message = f"{recipe.adapter.group} inputs share a column of A, and stage {name!r} has {has}. Use "
        yield Problem("adapter.group", message + (f"a multiple of {group}" if group else "adapter: lora"), None)
