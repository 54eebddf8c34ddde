"""Inputs and outputs of each pipeline action: the same on one rank and on many."""

from __future__ import annotations

from danlu.parallel.schedules.action import Action

Result = tuple[str, int | None, int | None]
"""(activation, gradient or weight; chunk; micro-batch)."""


def result(action: Action) -> Result:
    """Returns the result of a computation: the activation behind a chunk, the gradient before it, or its weight
    gradients.
    """
    what = {"forward": "activation", "weight": "weight"}.get(action.kind, "gradient")
    return what, action.chunk, action.micro


def needs(action: Action, num_chunks: int) -> list[Result]:
    """The results that a computation is made of, whichever rank they are on."""
    chunk, micro = action.chunk, action.micro
    assert chunk is not None
    if action.kind == "forward":
        return [("activation", chunk - 1, micro)] if chunk else []
    if action.kind == "weight":
        return [("gradient", chunk, micro)]
    behind = [("gradient", chunk + 1, micro)] if chunk + 1 < num_chunks else []
    return [("activation", chunk, micro), *behind]
