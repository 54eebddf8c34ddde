"""The default that follows from rollouts that round: the objective corrects their difference from the trainer."""

from __future__ import annotations

from dataclasses import replace

from danlu.recipe.sections import Objective
from danlu.recipe.sections.policy_gradient import Grpo, PolicyGradientSection
from danlu.recipe.type_hints import variants_of
from danlu.recipe.yaml_tree import Node


def expand_importance(tree: Node) -> None:
    """Writes `importance: token` into the policy gradient of a recipe in full form, in place, where `rollout.precision`
    or `rollout.cache` rounds and the recipe says nothing of it. `importance: null` leaves it out.
    """
    stage, rollout, objective = (tree.child(name) for name in ("stage", "rollout", "objective"))
    if stage is None or stage.value != "rl" or rollout is None:
        return
    written = [(key, rollout.child(key)) for key in ("precision", "cache")]
    rounding = [(key, node) for key, node in written if node is not None and node.value in ("int8", "fp8")]
    if not rounding:
        return
    key, node = rounding[0]
    origin = replace(node.origin, default_of=f"rollout.{key}: {node.value}")
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    if objective is None or objective.value is None:
        objective = tree.value["objective"] = Node([Node({"kind": Node(Grpo().kind, origin)}, origin)], origin)
    for term in objective.value if isinstance(objective.value, list) else []:
        kind = term.child("kind")
        variant = None if kind is None else variants_of(Objective).get(str(kind.value))
        if variant is not None and issubclass(variant, PolicyGradientSection) and isinstance(term.value, dict):
            term.value.setdefault("importance", Node({"level": Node("token", origin)}, origin))
