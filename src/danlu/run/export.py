"""The result of a run, a model folder or an adapter folder; and the export of any checkpoint that it left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from danlu.core.errors import CheckpointError
from danlu.core.output_folder import refuse_existing
from danlu.core.run_files import CHECKPOINTS
from danlu.core.shard_box import ShardBox
from danlu.parallel.comm import ALONE
from danlu.recipe import Recipe
from danlu.stages.protocols import Exporter
from danlu.stages.table import STAGES
from danlu.training.checkpoints.folders import is_checkpoint_folder, is_complete
from danlu.training.checkpoints.gathering import Gathering
from danlu.training.checkpoints.loading import load_checkpoint
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.run_folder import result_names, run_recipe
from danlu.training.state import Run, shard_boxes


def export_result(
    run: Run, exporter: Exporter, recipe: Recipe, folder: Path, log: Callable[[str], None]
) -> tuple[Path, ...]:
    """Writes the result: a model or an adapter, and its average next to it.

    If there are several processes the first writes, and gets one tensor after the other from all.
    """
    best = run.store.best() if recipe.checkpoint.keep_best else None
    if best is not None and best.step != run.state.step:
        log(f"exporting step {best.step}, which had the {best.criterion.superlative} ({best.value:.4f})")
        into = {"model": run.learner.weights()}
        if run.ema is not None:
            into["ema"] = run.ema.state_tensors()
        load_checkpoint(best.path, into, shard_boxes(run, into), run.store.group)
    elif run.state.ended_early and not recipe.checkpoint.keep_best and run.state.best_value is not None:
        log(
            f"early stop: exporting step {run.state.step}, the last one; the {run.criterion.superlative} "
            f"({run.state.best_value:.4f}) was before it. checkpoint.keep_best: true keeps that one and exports it"
        )
    own, averaged = (folder / name for name in result_names(recipe))
    run.store.wait()  # its group is used here
    if run.ema is None:
        return (_write(exporter, own, run),)
    with run.averaged():
        _write(exporter, averaged, run)
    return _write(exporter, own, run), averaged


def _write(exporter: Exporter, target: Path, run: Run | None = None) -> Path:
    """Writes `target`. run: the run with its shards on several processes; None where this process has all of it."""
    parallel = None if run is None else run.learner.parallel
    local = {} if parallel is None else parallel.all_parameters
    with Gathering(ALONE if run is None else run.store.group) as gathering:

        def value(name: str, box: ShardBox | None = None) -> Tensor | None:
            return gathering.part(name, local[name].local, local[name].box, box)

        exporter.write(target, value if local else None, writes=gathering.first)
    return target


def export_checkpoint(path: Path, target: Path, *, average: bool = False) -> Path:
    """Writes a checkpoint as the Hugging Face folder that the run would have ended with had it ended there.

    path: a run, for its newest checkpoint, or one of its checkpoints; the run may be training meanwhile.
    average: the averaged weights instead, of a recipe that keeps an average.
    Returns the checkpoint's folder. Raises CheckpointError if there is none, or it is damaged or has no average;
    ResourceError if `target` holds anything.
    """
    refuse_existing(target)
    named = is_checkpoint_folder(path)
    while True:
        checkpoint = path if named else _newest(path)
        was_whole = is_complete(checkpoint)
        try:
            _write_checkpoint(checkpoint, target, average)
        except (CheckpointError, FileNotFoundError) as error:
            if not was_whole or is_complete(checkpoint):
                raise
            if named:
                raise CheckpointError(
                    f"{checkpoint}: deleted while it was read: the run is going on, and keeps the newest alone "
                    "(checkpoint.keep). Export the run's folder instead, for its newest checkpoint"
                ) from error
        else:
            return checkpoint


def _newest(folder: Path) -> Path:
    latest = CheckpointStore(folder / CHECKPOINTS).latest()
    if latest is None:
        raise CheckpointError(f"{folder}: neither a run with a checkpoint nor a checkpoint")
    return latest.path


def _write_checkpoint(path: Path, target: Path, average: bool) -> None:
    recipe = run_recipe(path.resolve().parent.parent)
    if average and recipe.ema is None:
        raise CheckpointError(f"{path}: the run keeps no averaged weights (its recipe has no `ema`)")
    stage = STAGES[recipe.stage]
    policy, exporter = stage.builder(recipe, stage).unplaced(path)
    group = "ema" if average else "model"
    weights = policy.weights()
    if average:
        trained = {name for name, parameter in policy.parameters() if parameter.requires_grad}
        weights = {name: tensor for name, tensor in weights.items() if name in trained}
    load_checkpoint(path, {group: weights})
    _write(exporter, target)
