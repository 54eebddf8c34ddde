"""The effects of stages of lengths on the rest of a recipe: how many steps it has, and how long its samples are."""

from __future__ import annotations

from danlu.recipe.sections import LengthStage, Recipe
from danlu.recipe.yaml_tree import Node


def expand_lengths(tree: Node) -> None:
    """Writes `steps` and `data.max_length` as `long_context.stages` has them, in place, unless they are written.

    Everything that asks how much a step holds (memory, packing, preview) then sees the longest stage. Stages that are
    not of the right types are left to validation.
    """
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    section = tree.child("long_context")
    stages = None if section is None else section.child("stages")
    if stages is None or not isinstance(stages.value, list) or not stages.value:
        return
    # A key without a value (`steps: null`) says nothing, as one that is left out.
    is_open = all((node := tree.child(name)) is None or node.value is None for name in ("steps", "epochs"))
    if is_open and (steps := _whole_numbers(stages.value, "steps")):
        tree.value["steps"] = Node(sum(steps), stages.origin)
    data = tree.child("data")
    if data is None or not isinstance(data.value, dict) or "max_length" in data.value:
        return
    if lengths := _whole_numbers(stages.value, "length"):
        data.value["max_length"] = Node(max(lengths), stages.origin)


def amount_per_step(recipe: Recipe, stage: LengthStage) -> str:
    """Describes a step of a stage for the console: "4 x 2,048 tokens"; without packing "4 rows of at most ..."."""
    packs = recipe.batch.packs(stage.length)
    joined = "rows of at most" if recipe.data.packing.kind == "none" else "x"
    return f"{packs} {joined} {stage.length:,} tokens"


def _whole_numbers(stages: list[Node], name: str) -> list[int] | None:
    """The positive whole numbers of all stages at a key; None where one of them has none."""
    values = [None if (node := stage.child(name)) is None else node.value for stage in stages]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    return numbers if len(numbers) == len(stages) else None
