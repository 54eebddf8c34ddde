"""Names of stages that stand for a stage with an objective, and what a stage has by default."""

from __future__ import annotations

from danlu.recipe.yaml_tree import Node

OBJECTIVE_NAMES = {"cpo": "cpo", "dpo": "sigmoid", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
"""`stage: dpo` means `{stage: preference, objective: sigmoid}`, and so on."""
DEFAULT_OBJECTIVES = {"distill": "forward", "preference": "sigmoid", "reward": "bradley-terry"}
"""By stage, the kind of an objective that says none."""
DEFAULT_PAIRS = 8
"""Rows in a step of the stages whose batch counts rows, where the recipe has no `batch`."""


def expand_stage(tree: Node) -> None:
    """Writes the short name of a stage, the kind of its objective and its batch in full, in place."""
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    stage = tree.child("stage")
    if stage is None or not isinstance(stage.value, str):
        return
    name = stage.value
    if name in OBJECTIVE_NAMES:
        tree.value["stage"] = Node("preference", stage.origin, stage.key_origin)
    kind = OBJECTIVE_NAMES.get(name) or DEFAULT_OBJECTIVES.get(name)
    if kind is None:
        return
    objective = tree.child("objective")
    if objective is None:
        tree.value["objective"] = Node(kind, stage.origin)
    else:
        for term in objective.value if isinstance(objective.value, list) else [objective]:
            if isinstance(term.value, dict) and "kind" not in term.value:
                term.value = {"kind": Node(kind, term.origin), **term.value}
    if name == "distill":
        return
    if tree.child("batch") is None:
        tree.value["batch"] = Node({"pairs": Node(DEFAULT_PAIRS, stage.origin)}, stage.origin)
    data = tree.child("data")
    if data is not None and isinstance(data.value, dict) and data.child("packing") is None:
        data.value["packing"] = Node("none", stage.origin)  # a row is a tree, and stays by itself
