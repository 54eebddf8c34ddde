"""Saving and loading a run so that a kill at any instant loses nothing older than the last mark.

`CheckpointStore.save` writes into a fresh temporary folder, flushes it to disk, renames it into place, and only then
marks it complete; loading takes marked folders alone, and proves every hash before it touches a weight.

What is done where: tensors are written (into the page cache) and hashed while training waits, because training may
change them right afterwards and a copy would double the memory. 700 MB cost 0.9 core-seconds, which the threads share:
0.65 for hashing, the rest for writing (two-core Xeon; up to twice as much while the system has few free pages). A
thread that hashed the files later would take the same time from the training steps, and its hash would no longer be of
what memory held. Waiting for the disk (0.3 to 0.5 s), renaming, marking and pruning cost no CPU and go to a background
thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.errors import CheckpointError, ResourceError
from danlu.train.durable import sync_file, sync_folder, write_durably
from danlu.train.lock import pid_is_alive
from danlu.train.manifest import (
    MANIFEST,
    MARK,
    STATE,
    CheckpointInfo,
    Manifest,
    aside_folder_name,
    best_checkpoint,
    is_complete,
    list_checkpoints,
    mark_text,
    read_manifest,
    remove_checkpoint,
    step_folder_name,
    step_of,
    temporary_folder_name,
    to_prune,
    verify,
)
from danlu.train.shards import empty_for, mismatch, plan_shards, read_tensor, write_shard
from danlu.train.units import format_bytes

Groups = Mapping[str, Mapping[str, Tensor]]

_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.(\d+)\.tmp")
_ASIDE = re.compile(r"\.step-(\d{8,})\.old")
_MOST_THREADS = 8
_MANIFEST_BYTES_PER_TENSOR = 512  # an upper estimate, for the free-space check
_OUT_OF_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointStore:
    """The checkpoints of one run, in `folder`. Use it as a context manager, or call `close`.

    Args:
        keep        newest checkpoints kept
        keep_every  also keep steps that are a multiple of this
        keep_best   also keep the one with the lowest evaluation loss
        background  flush, publish and prune in a thread; an error there is raised by the next call

    Only one process may save into a folder: hold its `RunLock`. The thread does not outlive the process, so whoever
    leaves without `close` may leave an unmarked folder, which the next run clears away.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: bool = False,
        background: bool = True,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.background = background
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def save(self, step: int, tensors: Groups, state: dict[str, Any], *, loss: float | None = None) -> Path:
        """Write the checkpoint of `step`; when this returns, tensors and state may be changed.

        Args:
            tensors  groups ("model", "optimizer", "ema") of named tensors on any device
            state    everything else; only what JSON brings back unchanged: str, int, float, bool, None, list, dict
            loss     evaluation loss at this step, for `keep_best`
        Returns the folder it will be in once it is published. An earlier checkpoint of the same step is replaced.
        Raises ResourceError when it cannot be written (also for the previous save, when that failed in the
        background); older checkpoints stay as they were. TypeError for state that JSON would change.
        """
        self.wait()
        _require_json(state, "state")
        for group in tensors:
            if not _GROUP_NAME.fullmatch(group):
                raise ValueError(f"{group!r}: a group is named in lower-case letters, digits and underscores")
        state_json = json.dumps(state).encode()
        plans = [plan for group, named in tensors.items() for plan in plan_shards(group, named)]
        count = sum(len(named) for named in tensors.values())
        need = sum(plan.bytes for plan in plans) + len(state_json) + count * _MANIFEST_BYTES_PER_TENSOR + (1 << 16)
        temporary = self.folder / temporary_folder_name(step, os.getpid())
        with self._explained(step, need, temporary):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            if shutil.disk_usage(self.folder).free < need:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary.mkdir()
            threads = min(_MOST_THREADS, torch.get_num_threads())
            shards = tuple(write_shard(temporary, plan, tensors[plan.group], threads) for plan in plans)
            manifest = Manifest(
                step, tuple(tensors), shards, len(state_json), hashlib.sha256(state_json).hexdigest()
            ).to_json()
            (temporary / STATE).write_bytes(state_json)
            (temporary / MANIFEST).write_bytes(manifest.encode())
        total = sum(plan.bytes for plan in plans) + len(state_json) + len(manifest)
        mark = mark_text(manifest, total_bytes=total, loss=loss, time=time.time())
        if self.background:
            self._thread = threading.Thread(
                target=self._publish_and_remember, args=(step, temporary, mark, need), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._publish(step, temporary, mark, need)
        return self.folder / step_folder_name(step)

    def wait(self) -> None:
        """Return when the last save is on disk and marked. Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        self.wait()

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints by rising step, after waiting for a save under way."""
        self.wait()
        return list_checkpoints(self.folder)

    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint; whether it is intact shows when it is loaded."""
        return next((info for info in reversed(self.checkpoints()) if info.complete), None)

    def best(self) -> CheckpointInfo | None:
        """The complete checkpoint with the lowest evaluation loss."""
        return best_checkpoint(self.checkpoints())

    def discard_after(self, step: int) -> list[Path]:
        """Delete checkpoints of later steps; for a run that goes back on purpose, whose future they no longer are."""
        later = [info.path for info in self.checkpoints() if info.step > step]
        for path in later:
            remove_checkpoint(path)
        return later

    def _publish_and_remember(self, step: int, temporary: Path, mark: str, need: int) -> None:
        try:
            self._publish(step, temporary, mark, need)
        except BaseException as failure:  # raised again by wait(), in the thread that can act on it
            self._failure = failure

    def _publish(self, step: int, temporary: Path, mark: str, need: int) -> None:
        target, aside = self.folder / step_folder_name(step), self.folder / aside_folder_name(step)
        with self._explained(step, need, temporary):
            # An error of earlier write-back is still reported to a descriptor opened now (Linux, since 4.17).
            for file in temporary.iterdir():
                sync_file(file)
            sync_folder(temporary)
            if target.exists():
                target.rename(aside)
            temporary.rename(target)
            sync_folder(self.folder)
            write_durably(target / MARK, mark.encode())
            if aside.exists():
                remove_checkpoint(aside)
            for info in to_prune(
                list_checkpoints(self.folder), keep=self.keep, keep_every=self.keep_every, keep_best=self.keep_best
            ):
                remove_checkpoint(info.path)

    def _tidy(self) -> None:
        """Clear away what killed runs left; bring back a checkpoint that was set aside for one that never came."""
        for entry in sorted(entry for entry in self.folder.iterdir() if entry.is_dir()):
            if match := _TEMPORARY.fullmatch(entry.name):
                if int(match[1]) == os.getpid() or not pid_is_alive(int(match[1])):
                    shutil.rmtree(entry)
            elif match := _ASIDE.fullmatch(entry.name):
                target = self.folder / step_folder_name(int(match[1]))
                if is_complete(target) or not is_complete(entry):
                    remove_checkpoint(entry)
                else:
                    shutil.rmtree(target, ignore_errors=True)
                    entry.rename(target)
        for info in list_checkpoints(self.folder):
            if not info.complete:
                shutil.rmtree(info.path)

    @contextlib.contextmanager
    def _explained(self, step: int, need: int, temporary: Path) -> Iterator[None]:
        """Remove the temporary folder when anything goes wrong, and say what the system's error means here."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise ResourceError(self._explanation(step, need, error)) from error
            raise

    def _explanation(self, step: int, need: int, error: OSError) -> str:
        what = f"{self.folder}: the checkpoint of step {step} cannot be written"
        stays = self._what_stays()
        if error.errno not in _OUT_OF_ROOM:
            return f"{what}: {error.strerror or error} ({error.filename or self.folder}). {stays}"
        free = shutil.disk_usage(self.folder).free
        missing = (
            f"{format_bytes(need - free)} are missing"
            if free < need
            else f"but writing stopped ({os.strerror(error.errno)}): a quota, a file-size limit, or another writer"
        )
        return (
            f"{what}: it needs {format_bytes(need)}, {format_bytes(free)} are free, {missing}. {stays} "
            "Free some space, or keep fewer checkpoints (checkpoint.keep), and start the run again: it resumes."
        )

    def _what_stays(self) -> str:
        with contextlib.suppress(OSError):  # a folder that cannot even be read has nothing to report
            steps = [info.step for info in list_checkpoints(self.folder) if info.complete]
            if steps:
                return f"The checkpoint of step {steps[-1]} stays."
        return "There is no earlier checkpoint."


def load_checkpoint(path: Path, into: Groups) -> dict[str, Any]:
    """Copy tensors of the checkpoint at `path` into existing ones, and return its state.

    Args:  into  the groups to load, each with every tensor the checkpoint has for it: same names, dtypes, shapes.
    Nothing is touched before all hashes have been proved and all tensors been matched. Raises CheckpointError that
    names each damage and the newest older checkpoint that is intact, or each tensor that does not match.
    """
    manifest = _intact_manifest(path, into)
    problems = sorted(
        f"{group}.{name}: {problem}"
        for group, tensors in into.items()
        for name, problem in _mismatches(manifest, group, tensors)
    )
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise CheckpointError(f"{path} does not fit this run:\n  " + "\n  ".join(shown))
    for group, tensors in into.items():
        _fill(path, manifest, group, tensors)
    state: dict[str, Any] = json.loads((path / STATE).read_bytes())
    return state


def read_group(path: Path, group: str) -> dict[str, Tensor]:
    """All tensors of one group of the checkpoint at `path`, newly made on the CPU. Raises CheckpointError."""
    manifest = _intact_manifest(path, [group])
    tensors = {name: empty_for(entry) for name, (_, entry) in manifest.tensors(group).items()}
    _fill(path, manifest, group, tensors)
    return tensors


def read_state(path: Path) -> dict[str, Any]:
    """The state of the checkpoint at `path`, for deciding before any tensor is read. Raises CheckpointError."""
    _intact_manifest(path, [])
    state: dict[str, Any] = json.loads((path / STATE).read_bytes())
    return state


def _intact_manifest(path: Path, groups: Mapping[str, object] | list[str]) -> Manifest:
    problems = verify(path, groups)
    if problems:
        raise CheckpointError("\n  ".join([f"{path} is damaged:", *problems]) + "\n" + _way_out(path))
    manifest = read_manifest(path)
    for group in groups:
        if group not in manifest.groups:
            raise CheckpointError(f"{path} has no tensors of {group!r}; it has {', '.join(manifest.groups)}.")
    return manifest


def _way_out(path: Path) -> str:
    """What to do about a damaged checkpoint: the newest older one that is intact, and how to go on from it."""
    damaged = step_of(path)
    older = [info for info in list_checkpoints(path.parent) if info.complete and info.step < damaged]
    for info in reversed(older):
        if not verify(info.path):
            recipe = path.parent.parent / "recipe.yaml"
            return f"Step {info.step} is intact. To go on from it: danlu train {recipe} --resume {info.path}"
    return "No older checkpoint is intact. Give the run a new output folder to start again."


def _mismatches(manifest: Manifest, group: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    saved = manifest.tensors(group)
    for name in saved.keys() | tensors.keys():
        if name not in saved:
            yield name, "this run needs it, the checkpoint does not have it"
        elif name not in tensors:
            yield name, "the checkpoint has it, this run does not"
        elif problem := mismatch(saved[name][1], tensors[name]):
            yield name, problem


def _fill(path: Path, manifest: Manifest, group: str, tensors: Mapping[str, Tensor]) -> None:
    for shard in manifest.shards:
        if shard.group == group:
            fd = os.open(path / shard.file, os.O_RDONLY)
            try:
                for name, entry in shard.tensors.items():
                    read_tensor(fd, entry, tensors[name])
            finally:
                os.close(fd)


def _require_json(value: object, where: str) -> None:
    """Refuse what JSON would bring back as something else: a resumed run would go on from a changed state."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where}: the key {key!r} is no string, and JSON would make it one")
            _require_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{where}: a {type(value).__name__} does not come back from JSON as it was")
