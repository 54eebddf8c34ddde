"""The run folder: its files, the run that owns it, and the checkpoint in it from which a run continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.core.errors import CheckpointError, RecipeError, ResourceError
from danlu.core.output_folder import refuse_foreign_files
from danlu.core.run_files import (
    ADAPTER,
    ADAPTER_EMA,
    CHAIN,
    CHECKPOINTS,
    METRICS,
    MODEL,
    MODEL_EMA,
    OWN_FILES,
    RECIPE,
    SUMMARY,
    RunLock,
)
from danlu.recipe import Recipe
from danlu.recipe import load as load_recipe
from danlu.training.checkpoints.folders import CheckpointInfo, is_checkpoint_folder, list_checkpoints, step_folder_name
from danlu.training.checkpoints.loading import read_state
from danlu.training.checkpoints.manifest import MARK
from danlu.training.checkpoints.store import CheckpointStore

if TYPE_CHECKING:
    from danlu.recipe import Change

LENGTHS = ("steps", "epochs")
"""The keys that say how long a run is; a finished run goes on where one of them is raised."""


@dataclass(frozen=True)
class Start:
    """The checkpoint a run continues from, and the recipe's changes since then (none that matter)."""

    path: Path
    changes: Sequence[Change]

    @property
    def goes_further(self) -> bool:
        """Whether the run was finished here, and its recipe asks for more steps or epochs now."""
        return any(change.key in LENGTHS for change in self.changes)


def starting_point(
    folder: Path, recipe: Recipe, resume: str, log: Callable[[str], None], *, into: Path | None = None
) -> Start | None:
    """The checkpoint to go on from, None to start afresh. Raises CheckpointError if the folder is not this run's.

    into: the folder that will be written to, where it is another, as in a dry run. It gets the metrics that belong to
    the checkpoint.
    """
    start = _starting_point(folder, recipe, resume, log)
    into = into or folder
    if start is not None and into.resolve() != (run := start.path.resolve().parent.parent):
        with suppress(FileNotFoundError):
            shutil.copyfile(run / METRICS, into / METRICS)
    return start


def _starting_point(folder: Path, recipe: Recipe, resume: str, log: Callable[[str], None]) -> Start | None:
    store = CheckpointStore(folder / CHECKPOINTS)
    latest = store.latest()
    if resume not in ("auto", "never"):
        return _given_point(Path(resume).expanduser().resolve(), folder, recipe, latest)
    for info in store.checkpoints():
        if latest is None or info.step > latest.step:
            log(f"{info.path.name} is half-written (the run was stopped while saving it) and is not used")
    if latest is None:
        return None
    if resume == "never":
        raise CheckpointError(
            f"{folder}: holds a run (step {latest.step}). Choose another `output`, or leave out --resume never."
        )
    return Start(latest.path, _harmless_changes(folder, recipe, latest.path))


def resumed_run(folder: Path, resume: str) -> Path | None:
    """The run folder with the checkpoint that `starting_point` would continue from; None where it starts afresh, or
    refuses."""
    if resume not in ("auto", "never"):
        checkpoint = Path(resume).expanduser().resolve()
        return checkpoint.parent.parent if is_checkpoint_folder(checkpoint) else None
    return None if CheckpointStore(folder / CHECKPOINTS).latest() is None else folder


def _given_point(path: Path, folder: Path, recipe: Recipe, latest: CheckpointInfo | None) -> Start:
    """A checkpoint named by the user: of this folder, or of another that this one, still empty, branches off."""
    if not is_checkpoint_folder(path):
        raise CheckpointError(
            f"{path}: no checkpoint. --resume takes auto, never, or a folder such as "
            f"{folder / CHECKPOINTS / step_folder_name(100)}."
        )
    run = path.parent.parent
    start = Start(path, _harmless_changes(run, recipe, path))
    if run == folder.resolve():
        return start
    if latest is not None:
        raise CheckpointError(
            f"{folder}: holds a run of its own (step {latest.step}), and {path} is of another. Choose a new `output`."
        )
    return start


def check_output_folder(folder: Path) -> None:
    """Raises ResourceError if a run would begin among things that are not a run's, or over a result."""
    if not folder.is_dir() or list_checkpoints(folder / CHECKPOINTS):
        return
    advice = "Choose an empty or new `output`."
    refuse_foreign_files(
        folder,
        lambda name: OWN_FILES.fullmatch(name) is not None,
        holds="the output folder holds other things",
        advice=advice,
    )
    if results := _results(folder):
        raise ResourceError(
            f"{folder}: the output folder holds a trained {results[0]} but no checkpoint to go on from, and a new run "
            "would replace it. Choose another `output`, or move the folder away."
        )


def move_aside(folder: Path, log: Callable[[str], None]) -> None:
    """Renames a folder that holds a run or a chain to NAME.1, or the next number that is free, so that another begins.

    A folder with neither a checkpoint nor a result stays: there is nothing in it to keep.
    Raises ResourceError for a folder that is no run's, and for one that a process is using.
    """
    if not folder.is_dir():
        return
    runs = [folder, *_runs_of_chain(folder)]
    is_begun = any(list_checkpoints(run / CHECKPOINTS) or _results(run) for run in runs)
    if not is_begun and not _quantized_by_chain(folder):
        return
    if len(runs) == 1 and not ((folder / RECIPE).is_file() or (folder / CHAIN).is_file()):
        raise ResourceError(f"{folder}: no run of danlu has written this folder, so --overwrite does not move it")
    for run in runs:
        with RunLock(run):  # let go again at once: only a run that is going on should hinder this
            pass
    target = next(name for name in map(folder.with_name, (f"{folder.name}.{n}" for n in count(1))) if not name.exists())
    try:
        folder.rename(target)
    except OSError as error:
        raise ResourceError(f"{folder}: --overwrite cannot rename it to {target.name}: {error.strerror}") from error
    log(f"--overwrite: the earlier run is in {target} now")


def _runs_of_chain(folder: Path) -> list[Path]:
    """The run folders of a chain's stages; none where the folder is no chain's."""
    if not (folder / CHAIN).is_file():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{RECIPE}"))


def _quantized_by_chain(folder: Path) -> bool:
    """Whether a stage of a chain has written a quantized model; False where the folder is no chain's."""
    return (folder / CHAIN).is_file() and any(folder.glob("*/config.json"))


def _results(run: Path) -> list[str]:
    return [name for name in (MODEL, ADAPTER) if (run / name).exists()]


def require_writable(folder: Path) -> None:
    """Raises ResourceError where a run could not write its folder, or make it; nothing is written."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "Permission denied" if existing.is_dir() else "Not a directory"
        raise ResourceError(f"{folder}: the run folder cannot be written: {why}. Choose another `output`.")


def run_recipe(run: Path) -> Recipe:
    """The recipe of the run in a folder. Raises CheckpointError if it is missing or cannot be read."""
    written = run / RECIPE
    if not written.is_file():
        raise CheckpointError(f"{written}: missing; without it nobody can tell which recipe the checkpoints belong to.")
    try:
        return load_recipe(written).recipe
    except RecipeError as error:
        lines = "\n  ".join(error.problems)
        raise CheckpointError(f"{run}: the recipe of the run there does not hold any more:\n  {lines}") from error


def _harmless_changes(run: Path, recipe: Recipe, checkpoint: Path) -> list[Change]:
    """Returns the differences from the run's recipe that do not matter to the steps that its checkpoint has behind it.

    Raises CheckpointError if a difference matters, or the run's recipe cannot be read.
    """
    from danlu.recipe import changes  # here: a run that begins compares nothing

    all_changes = changes(run_recipe(run), recipe)
    different = [change for change in all_changes if change.matters and not _goes_further(change, checkpoint)]
    if not different:
        return [change for change in all_changes if change.key != "output"]
    lines = "\n  ".join(str(change) for change in different)
    advice = (
        "To start again, add --overwrite, which keeps this run under another name, or choose another `output`; to go "
        "on, undo the change."
    )
    lengths = [change for change in different if change.key in LENGTHS]
    if lengths:
        advice += f" {_advice_on_length(lengths, run, checkpoint)}."
    raise CheckpointError(f"{run} holds a run of another recipe; what differs (there -> here):\n  {lines}\n{advice}")


def _advice_on_length(lengths: Sequence[Change], run: Path, checkpoint: Path) -> str:
    """Says how a run becomes longer: when it has done all its steps, and never where early stop has ended it."""
    state = read_state(checkpoint)
    further = f"to train its result further in a new one, use model.path: {run / MODEL}"
    if not any(_is_longer(change) for change in lengths):
        return f"A finished run goes on when `steps` (or `epochs`, where it has those) is raised; {further}"
    if state["finished"]:
        return f"Early stop has ended this run, and such a run is not prolonged; {further}"
    return (
        f"This run was stopped after step {state['run']['step']}, before its end: let it finish with its own recipe, "
        "and raise `steps` (or `epochs`) then, with which a finished run goes on"
    )


def _is_longer(change: Change) -> bool:
    return change.old is not None and change.new is not None and bool(change.new > change.old)


def _goes_further(change: Change, checkpoint: Path) -> bool:
    """Whether a change asks for more of a run that has done all its steps at the checkpoint."""
    if change.key not in LENGTHS or not _is_longer(change):
        return False
    state = read_state(checkpoint)
    return bool(state["finished"]) and not state["run"].get("ended_early", False)


def result_names(recipe: Recipe) -> tuple[str, str]:
    """Names in the run folder of the result and of its moving average: of models, or of adapters."""
    return (MODEL, MODEL_EMA) if recipe.adapter is None else (ADAPTER, ADAPTER_EMA)


def finished(start: Path, recipe: Recipe, folder: Path) -> tuple[Path, ...]:
    """The model folders of a run that has nothing left to do; none where training or the export is not through."""
    own, averaged = (folder / name for name in result_names(recipe))
    results = (own,) if recipe.ema is None else (own, averaged)
    if not read_state(start)["finished"]:
        return ()
    saved = (start / MARK).stat().st_mtime  # an export that is older is that of an earlier pass over these steps
    files = (*results, folder / SUMMARY)
    return results if all(path.exists() and path.stat().st_mtime >= saved for path in files) else ()
