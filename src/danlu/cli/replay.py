"""`danlu replay`: whether a rollout of a run, made again, has the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danlu.core.errors import CheckpointError, DanluError
from danlu.core.terminal import echo, print_status, print_status_early
from danlu.training.runs import is_run


def replay(
    run: Annotated[Path, typer.Argument(help="The folder of a run of stage rl.")],
    step: Annotated[int, typer.Option(min=1, metavar="N", help="A step that was trained on the rollout.")],
) -> None:
    """Make the rollout of a step again, from the nearest checkpoint before it or the start, and compare its tokens.

    The steps between are taken again with the rewards that rollouts.jsonl has; none is asked for. Nothing is written
    to the run's folder. Exit code 1 where any token differs.
    """
    if not is_run(run):
        raise CheckpointError(f"{run}: no run is in this folder: it has no recipe.yaml or no environment.json")
    print_status_early(f"replaying {run}")
    # Here, not above: what is no run is refused in a fraction of the second that torch takes to import.
    from danlu.run.replay import replay as replayed_rollout

    result = replayed_rollout(run, step, log=print_status)
    since = "the start of the run" if result.from_step == 0 else f"the checkpoint of step {result.from_step}"
    if result.difference is not None:
        echo(f"different: {result.difference}")
        echo(f"{result.rollouts - 1:,} rollouts before it are the same, from {since}")
        raise typer.Exit(DanluError.exit_code)
    echo(
        f"identical: {result.tokens:,} tokens of {result.answers:,} answers in the rollout of step {result.step}, and "
        f"the {result.rollouts - 1:,} rollouts before it from {since}"
    )
