"""Steps whose weight gradients are put off, in some layout, as each process of a group sees them."""

from __future__ import annotations

from collections.abc import Sequence

from builders.parallel_steps import see
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.schedules import Action
from danlu.verification.trace import Trace


def split_actions(micro_batches: int) -> tuple[Action, ...]:
    """One stage's actions, with weight passes that run one micro-batch behind input passes."""
    computations = []
    for micro in range(micro_batches):
        computations += [Action("forward", 0, micro), Action("input", 0, micro)]
        computations += [Action("weight", 0, micro - 1)] if micro else []
    return (*computations, Action("weight", 0, micro_batches - 1), Action("reduce", 0), Action("update"))


def see_split(files: Sequence[str], packs: int, micro: int, mistake: bool = False) -> dict[str, Trace]:
    """What this process sees of each recipe; with a mistake the first weight pass is left out. For a process that ends
    with it."""

    def actions(parallel: ParallelContext, micro_batches: int) -> tuple[Action, ...]:
        return tuple(
            action
            for action in split_actions(micro_batches)
            if not mistake or (action.kind, action.micro) != ("weight", 0)
        )

    ParallelContext.actions = actions  # type: ignore[method-assign]
    return see(files, packs, micro)
