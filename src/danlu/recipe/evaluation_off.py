"""Evaluation that is turned off: `data.eval: 0` and `evaluation: null`, with the settings that need rows for it."""

from __future__ import annotations

from danlu.recipe.yaml_tree import Node


def turn_off_evaluation(tree: Node) -> None:
    """Takes out, in place, evaluation rows and what is judged by them, where a recipe in full form turns them off.

    `data.eval: 0` (or false) leaves `evaluation.samples`, which needs no rows; `evaluation: null` (or false) nothing.
    """
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    data, evaluation, checkpoint = (tree.child(name) for name in ("data", "evaluation", "checkpoint"))
    rows = None if data is None else data.child("eval")
    every = None if evaluation is None else evaluation.child("every")
    has_no_rows = rows is not None and _is_zero(rows)
    is_off = evaluation is not None and (evaluation.value is None or (every is not None and every.value is False))
    if not has_no_rows and not is_off:
        return
    if data is not None and isinstance(data.value, dict) and rows is not None:
        data.value["eval"] = Node(None, rows.origin, rows.key_origin)
    if is_off:
        del tree.value["evaluation"]
    elif evaluation is not None and isinstance(evaluation.value, dict):
        keeps_interval = (samples := evaluation.child("samples")) is not None and samples.value is not None
        for name in ("early_stop", "metric", *(() if keeps_interval else ("every",))):
            evaluation.value.pop(name, None)
    if checkpoint is not None and isinstance(checkpoint.value, dict):
        checkpoint.value.pop("keep_best", None)


def _is_zero(node: Node) -> bool:
    return isinstance(node.value, int | float) and node.value == 0
