"""Checkpoint folders: their names, listing them, choosing what to prune, removing one.

Nothing here needs torch, so `danlu checkpoint` answers at once::

    checkpoints/
      step-00000500/ model-00001-of-00002.safetensors    tensors of the group "model", readable by any safetensors
      reader ...                                 or, of rank 3 of several, model-rank00003-00001-of-00002.safetensors
      state.json                          everything that is not a tensor manifest.json                       size of
      each file; dtype, shape, place and SHA-256 of each tensor, and which box of the whole it is, where it is a part
      COMPLETE                            the mark: SHA-256 of manifest.json, and the values of a listing
      .step-00000600.4711.tmp/              being written by process 4711 and those it works with
      .step-00000600.old/                   stands in for step 600 while that step is written again

The mark is written last, after everything else has reached the disk, so a folder without it is not a checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from danlu.core.errors import CheckpointError
from danlu.training.checkpoints.manifest import MARK, judged
from danlu.training.criterion import LOSS, Criterion

STEP_FOLDER = re.compile(r"step-(\d{8,})")
TEMPORARY_FOLDER = re.compile(r"\.step-\d{8,}\.(\d+)\.tmp")
ASIDE_FOLDER = re.compile(r"\.step-(\d{8,})\.old")
_LISTING_ATTEMPTS = 5  # for a folder that changes meanwhile


@dataclass(frozen=True)
class CheckpointInfo:
    """One line of a listing. An incomplete checkpoint has no loss and no time of its own."""

    step: int
    path: Path
    complete: bool
    bytes: int
    loss: float | None  # evaluation loss at this step, where there was one
    time: float  # seconds since the epoch
    criterion: Criterion = LOSS  # what its run was judged by
    value: float | None = None  # of the criterion at this step, where it was finite

    def value_by(self, criterion: Criterion) -> float | None:
        """The value of `criterion` at this step; None where it was not written down."""
        if criterion == LOSS:
            return self.loss
        return self.value if self.criterion == criterion else None


def step_folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def temporary_folder_name(step: int, pid: int) -> str:
    """The name of the folder in which process `pid` (the first of several) writes the checkpoint of a step."""
    return f".{step_folder_name(step)}.{pid}.tmp"


def aside_folder_name(step: int) -> str:
    """The name that the checkpoint of a step has while that step is written again."""
    return f".{step_folder_name(step)}.old"


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Checkpoints in `folder` by rising step, incomplete ones included; empty when there is no such folder.

    The run may be training meanwhile: one that it prunes while this looks is not in the list, and the one that it saved
    before that is.
    """
    for _ in range(_LISTING_ATTEMPTS):
        entries = _subfolders(folder)
        checkpoints = _describe_all(entries)
        if _subfolders(folder) == entries:
            break
    return checkpoints


def _describe_all(entries: Sequence[Path]) -> list[CheckpointInfo]:
    by_step: dict[int, CheckpointInfo] = {}
    for entry in entries:
        if match := STEP_FOLDER.fullmatch(entry.name):
            with suppress(CheckpointError):
                by_step[int(match[1])] = describe(entry, int(match[1]))
    for entry in entries:
        match = ASIDE_FOLDER.fullmatch(entry.name)
        # Set aside by a save of the same step that was killed before its own mark: still the checkpoint of that step.
        if match and is_complete(entry) and not (int(match[1]) in by_step and by_step[int(match[1])].complete):
            with suppress(CheckpointError):
                by_step[int(match[1])] = describe(entry, int(match[1]))
    return [by_step[step] for step in sorted(by_step)]


def describe(path: Path, step: int) -> CheckpointInfo:
    """Reads the mark of the checkpoint at `path`; for one without a mark, looks at its files.

    A mark that cannot be read still counts as one: the checkpoint was complete once, and loading it must report that it
    is damaged rather than pass over it. Raises CheckpointError where there is nothing (any more).
    """
    try:
        mark = json.loads((path / MARK).read_bytes())
        criterion, value = judged(mark)
        return CheckpointInfo(step, path, True, int(mark["bytes"]), mark["loss"], float(mark["time"]), criterion, value)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        try:
            size = sum(_file_bytes(file) for file in path.glob("*"))
            return CheckpointInfo(step, path, is_complete(path), size, None, path.stat().st_mtime)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: there is no such checkpoint.") from None


def is_complete(path: Path) -> bool:
    """Whether the checkpoint at `path` has its mark."""
    return (path / MARK).is_file()


def is_checkpoint_folder(path: Path) -> bool:
    """Whether `path` is one checkpoint, by its name; it may be half-written."""
    return _matched(path) is not None and path.is_dir()


def step_of(path: Path) -> int:
    """The step a checkpoint folder is of, from its name. Raises CheckpointError when it is not named like one."""
    match = _matched(path)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint; those are folders named like {step_folder_name(500)}.")
    return int(match[1])


def to_prune(
    checkpoints: Sequence[CheckpointInfo], *, keep: int, keep_every: int | None = None, keep_best: bool = False
) -> list[CheckpointInfo]:
    """Complete checkpoints that nothing asks to keep, oldest first. Decides only; deletes nothing.

    Kept are the newest `keep`, every step that is a multiple of `keep_every`, and with `keep_best` the best one (the
    earliest of equals). Raises ValueError for a `keep` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    complete = [info for info in checkpoints if info.complete]
    kept = {info.step for info in complete[-keep:]}
    if keep_every is not None:
        kept |= {info.step for info in complete if info.step % keep_every == 0}
    if keep_best and (best := best_checkpoint(complete)) is not None:
        kept.add(best.step)
    return [info for info in complete if info.step not in kept]


def best_checkpoint(checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """The complete checkpoint with the best evaluation, by the criterion of the newest that was evaluated.

    The earliest of equals; None when none was evaluated.
    """
    complete = [info for info in checkpoints if info.complete]
    criterion = next((info.criterion for info in reversed(complete) if info.value is not None), LOSS)
    values = [(info.value_by(criterion), info) for info in complete]
    costs = [(criterion.cost(value), info.step, info) for value, info in values if value is not None]
    return min(costs, key=lambda entry: entry[:2])[2] if costs else None


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: its mark first, so that a kill midway leaves nothing that looks whole."""
    (path / MARK).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=False)


def _matched(path: Path) -> re.Match[str] | None:
    name = path.resolve().name
    return STEP_FOLDER.fullmatch(name) or ASIDE_FOLDER.fullmatch(name)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _file_bytes(file: Path) -> int:
    """Bytes of a file; none of a folder, nor of a file that is gone by now."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
