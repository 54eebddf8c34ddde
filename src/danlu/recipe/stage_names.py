"""Names of stages that stand for a stage with an objective, and the objective of a stage that names none."""

from __future__ import annotations

from danlu.recipe.yaml_tree import Node, Origin

OBJECTIVE_NAMES = {
    "cpo": ("preference", "cpo"),
    "dapo": ("rl", "dapo"),
    "dpo": ("preference", "sigmoid"),
    "dr-grpo": ("rl", "dr-grpo"),
    "grpo": ("rl", "grpo"),
    "gspo": ("rl", "gspo"),
    "kto": ("preference", "kto"),
    "online-dpo": ("rl", "sigmoid"),
    "orpo": ("preference", "orpo"),
    "ppo": ("rl", "ppo"),
    "reinforce": ("rl", "reinforce"),
    "remax": ("rl", "remax"),
    "rloo": ("rl", "rloo"),
    "simpo": ("preference", "simpo"),
}
"""`stage: dpo` means `{stage: preference, objective: sigmoid}`, and so on."""
DEFAULT_OBJECTIVES = {"distill": "forward", "preference": "sigmoid", "reward": "bradley-terry", "rl": "grpo"}
"""The default kind of the objective, by stage."""
VERBS_OF_STAGES = {"quantize": "danlu quantize", "curate": "danlu data clean", "synthesize": "danlu synthesize"}
"""The verbs for stages that do not train: their recipes are of other kinds (`other_stages`)."""
TREES = ("preference", "reward", "rl")
"""Stages in which a row is a tree of tokens: a prompt with its answers."""


def expand_stage(tree: Node) -> None:
    """Writes the short name of a stage and the kind of its objective in full, in place."""
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    stage = tree.child("stage")
    if stage is None or not isinstance(stage.value, str):
        return
    name, kind = OBJECTIVE_NAMES.get(stage.value) or (stage.value, DEFAULT_OBJECTIVES.get(stage.value))
    if kind is None:
        return
    tree.value["stage"] = Node(name, stage.origin, stage.key_origin)
    objective = tree.child("objective")
    if objective is None:
        tree.value["objective"] = Node(kind, stage.origin)
    else:
        for term in objective.value if isinstance(objective.value, list) else [objective]:
            if isinstance(term.value, dict) and "kind" not in term.value:
                term.value = {"kind": Node(kind, term.origin), **term.value}
    if name in TREES:
        _without_packing(tree, stage.origin)  # a row is a tree, and stays by itself
    on_policy = tree.child("on_policy")
    if name == "distill" and on_policy is not None and on_policy.value:
        _without_packing(tree, on_policy.origin)  # each row is answered by itself


def _without_packing(tree: Node, origin: Origin) -> None:
    """Writes that rows are not packed, unless the recipe says how they are."""
    data = tree.child("data")
    if data is not None and isinstance(data.value, dict) and data.child("packing") is None:
        data.value["packing"] = Node("none", origin)
