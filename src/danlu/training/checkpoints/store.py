"""Saving and loading a run so that a kill at any instant loses nothing older than the last mark.

`CheckpointStore.save` writes into a fresh temporary folder, flushes it to disk, renames it into place, and only then
marks it complete; loading takes marked folders alone, and proves every hash before it touches a weight.

Division of the work: tensors are written (into the page cache) and hashed while training waits, because training may
change them right afterwards and a copy would double the memory. 700 MB cost 0.9 core-seconds, which the threads share:
0.65 for hashing, the rest for writing (two-core Xeon; up to twice as much while the system has few free pages). A
thread that hashed the files later would take the same time from the training steps, and its hash would no longer be of
the memory that was saved. Waiting for the disk (0.3 to 0.5 s), renaming, marking and pruning cost no CPU and go to a
background thread.

Several processes write one checkpoint: each the boxes that are its own, into files of its own, in one folder that the
first of them creates, publishes, lists and prunes. An error of one of them is raised on all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.core.atomic_write import sync_file, sync_folder, write_atomically
from danlu.core.errors import CheckpointError, ResourceError
from danlu.core.machine import pid_is_alive
from danlu.core.safetensors_format import WRITING_THREADS
from danlu.core.shard_box import ShardBox
from danlu.parallel.comm import ALONE, Group
from danlu.training.agreement import agree
from danlu.training.checkpoints.folders import (
    ASIDE_FOLDER,
    TEMPORARY_FOLDER,
    CheckpointInfo,
    aside_folder_name,
    best_checkpoint,
    is_complete,
    list_checkpoints,
    remove_checkpoint,
    step_folder_name,
    temporary_folder_name,
    to_prune,
)
from danlu.training.checkpoints.loading import Boxes, Groups
from danlu.training.checkpoints.manifest import MANIFEST, MARK, STATE, Manifest, Shard, coverage_problems, mark_text
from danlu.training.checkpoints.shard_files import ShardPlan, plan_shards, write_shard
from danlu.training.criterion import LOSS, Criterion
from danlu.training.units import format_bytes

_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MANIFEST_BYTES_PER_TENSOR = 512  # an upper estimate, for the free-space check
_NO_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointStore:
    """The checkpoints of one run, in `folder`. Use it as a context manager, or call `close`.

    Args:
        keep        newest checkpoints kept
        keep_every  also keep steps that are a multiple of this
        keep_best   also keep the one with the best evaluation
        criterion   judges evaluations
        background  flush, publish and prune in a thread; an error there is raised by the next call
        group       the processes that save together, in a group that nothing else uses: the thread talks in it while
                    training talks in others. All of them make every call, with one folder on a disk that they share.

    Only one process or group may save into a folder: hold its `RunLock`. The thread does not outlive the process, so
    whoever leaves without `close` may leave an unmarked folder, which the next run clears away.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: bool = False,
        criterion: Criterion = LOSS,
        background: bool = True,
        group: Group = ALONE,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.criterion = criterion
        self.background = background
        self.group = group
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        tensors: Groups,
        state: dict[str, Any],
        *,
        loss: float | None = None,
        value: float | None = None,
        boxes: Boxes | None = None,
    ) -> Path:
        """Write the checkpoint of `step`; when this returns, tensors and state may be changed.

        Args:
            tensors  groups ("model", "optimizer", "ema") of named tensors on any device
            state    everything else; only what JSON brings back unchanged: str, int, float, bool, None, list, dict. Of
                     several processes, that of the first is kept
            loss     evaluation loss at this step
            value    the criterion's value at this step, for `keep_best`; by default the loss
            boxes    the box of the whole that a tensor is; one without is whole and the same on all processes. One that
                     has not its box's shape (state in blocks) is kept with the box, and loads into the same box alone
        Returns the folder it will be in once it is published. An earlier checkpoint of the same step is replaced.
        Raises ResourceError when it cannot be written (also for the previous save, when that failed in the
        background, and with several processes an error of writing); older checkpoints stay as they were.
        TypeError for state that JSON would change. CheckpointError where the boxes do not make up the whole.
        """
        self.wait()
        draft = _Draft(tensors, state, boxes or {}, self.group)
        name, needed_bytes = agree(self.group, draft.plan, partial(self._begin, step))
        temporary = self.folder / name
        written: list[Shard] | Exception
        try:
            with self._explained(step, needed_bytes, temporary):
                written = draft.write(temporary)
        except Exception as error:
            if self.group.alone:
                raise
            written = error  # the others wait for it in _publish
        mark = partial(mark_text, loss=loss, criterion=self.criterion, value=value)
        publish = partial(self._publish, step, temporary, needed_bytes, draft, written, mark)
        if self.background:
            self._thread = threading.Thread(
                target=self._publish_and_remember, args=(publish,), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            publish()
        return self.folder / step_folder_name(step)

    def wait(self) -> None:
        """Waits until the last save is on disk and marked. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for a save under way. Raises its error."""
        self.wait()

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints by rising step, after waiting for a save under way."""
        self.wait()
        return agree(self.group, lambda: None, lambda _: list_checkpoints(self.folder))

    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint; whether it is intact shows when it is loaded."""
        return next((info for info in reversed(self.checkpoints()) if info.complete), None)

    def best(self) -> CheckpointInfo | None:
        """The complete checkpoint with the best evaluation."""
        return best_checkpoint(self.checkpoints())

    def make_room(self) -> None:
        """Deletes the present checkpoints that no rule keeps (`keep` and the others).

        They are deleted after each save in any case. Here a run that goes on with a smaller `keep`, because a disk was
        full, gets the room before its next save.
        """
        self.wait()
        agree(self.group, lambda: None, lambda _: self._prune(list_checkpoints(self.folder)))

    def _prune(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        unwanted = to_prune(checkpoints, keep=self.keep, keep_every=self.keep_every, keep_best=self.keep_best)
        for info in unwanted:
            remove_checkpoint(info.path)

    def discard_after(self, step: int) -> list[Path]:
        """Deletes checkpoints of later steps; for a run that goes back on purpose, so that they are not of its
        future."""
        self.wait()
        return agree(self.group, lambda: None, lambda _: self._discard_after(step))

    def _discard_after(self, step: int) -> list[Path]:
        later = [info.path for info in list_checkpoints(self.folder) if info.step > step]
        for path in later:
            remove_checkpoint(path)
        return later

    def _begin(self, step: int, needed_bytes_by_rank: list[int]) -> tuple[str, int]:
        """Makes an empty temporary folder, on the first process. Returns its name, and the bytes that will be in it."""
        needed_bytes = sum(needed_bytes_by_rank)
        temporary = self.folder / temporary_folder_name(step, os.getpid())
        with self._explained(step, needed_bytes, temporary):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            if self._free_bytes() < needed_bytes:
                self._prune_for(step)
            if self._free_bytes() < needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary.mkdir()
        return temporary.name, needed_bytes

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _prune_for(self, step: int) -> None:
        """Deletes the checkpoints that no rule keeps once `step` is saved, where there is no room for both.

        The newest complete checkpoint stays, whatever is asked for: a kill before `step` is marked leaves it.
        """
        complete = [info for info in list_checkpoints(self.folder) if info.complete]
        newer = CheckpointInfo(step, self.folder / step_folder_name(step), True, 0, None, 0.0)
        if complete and complete[-1].step < step and self.keep > 1:
            self._prune([*complete, newer])

    def _publish_and_remember(self, publish: partial[None]) -> None:
        try:
            publish()
        except BaseException as failure:  # raised again by wait(), in the thread that can act on it
            self._failure = failure

    def _publish(
        self,
        step: int,
        temporary: Path,
        needed_bytes: int,
        draft: _Draft,
        written: list[Shard] | Exception,
        mark: Callable[..., str],
    ) -> None:
        """Flushes the files that each process has written; then the first one gives the folder its name and its mark.

        written: the shard files of this process, or the error that it stopped with, which is raised on all.
        """

        def flush() -> list[Shard]:
            if isinstance(written, Exception):
                raise written
            with self._explained(step, needed_bytes, temporary):
                # An error of earlier write-back is still reported to a descriptor opened now (Linux, since 4.17).
                for shard in written:
                    sync_file(temporary / shard.file)
            return written

        def finish(shards: list[list[Shard]]) -> None:
            with self._explained(step, needed_bytes, temporary):
                self._finish(step, temporary, draft, tuple(chain.from_iterable(shards)), mark)

        try:
            agree(self.group, flush, finish)
        except BaseException:
            self._remove_temporary(temporary)
            raise

    def _finish(
        self, step: int, temporary: Path, draft: _Draft, shards: tuple[Shard, ...], mark: Callable[..., str]
    ) -> None:
        """Completes the folder on the first process, once all tensors are on the disk: the other files, its place, its
        mark.

        This order makes a kill harmless. Before the renaming there is only a temporary folder; between renaming and
        mark, an unmarked one, with the earlier checkpoint of that step under its `aside` name; and only after the mark
        is anything older deleted.
        """
        groups = tuple(dict.fromkeys([*draft.tensors, *(shard.group for shard in shards)]))
        if problems := [problem for group in groups for problem in coverage_problems(group, shards)]:
            raise CheckpointError(
                f"{self.folder}: the checkpoint of step {step} is not kept, for its parts are not the whole (an error "
                "of danlu, please report it):\n  " + "\n  ".join(problems)
            )
        state_hash = hashlib.sha256(draft.state_json).hexdigest()
        manifest = Manifest(step, groups, shards, len(draft.state_json), state_hash).to_json()
        for name, content in ((STATE, draft.state_json), (MANIFEST, manifest.encode())):
            (temporary / name).write_bytes(content)
            sync_file(temporary / name)
        sync_folder(temporary)
        target, aside = self.folder / step_folder_name(step), self.folder / aside_folder_name(step)
        if target.exists():  # the step is saved again: a folder cannot be replaced by one renaming
            target.rename(aside)
        temporary.rename(target)
        sync_folder(self.folder)
        total = sum(shard.bytes for shard in shards) + len(draft.state_json) + len(manifest)
        write_atomically(target / MARK, mark(manifest, total_bytes=total, time=time.time()).encode())
        if aside.exists():
            remove_checkpoint(aside)
        self._prune(list_checkpoints(self.folder))

    def _clear_leftovers(self) -> None:
        """Deletes leftovers of killed runs; restores a checkpoint that was set aside for one that was never marked."""
        for entry in sorted(entry for entry in self.folder.iterdir() if entry.is_dir()):
            if match := TEMPORARY_FOLDER.fullmatch(entry.name):
                if int(match[1]) == os.getpid() or not pid_is_alive(int(match[1])):
                    shutil.rmtree(entry)
            elif match := ASIDE_FOLDER.fullmatch(entry.name):
                target = self.folder / step_folder_name(int(match[1]))
                if is_complete(target) or not is_complete(entry):
                    remove_checkpoint(entry)
                else:
                    shutil.rmtree(target, ignore_errors=True)
                    entry.rename(target)
        for info in list_checkpoints(self.folder):
            if not info.complete:
                shutil.rmtree(info.path)

    def _remove_temporary(self, temporary: Path) -> None:
        if self.group.index == 0:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self, step: int, needed_bytes: int, temporary: Path) -> Iterator[None]:
        """Turns the system's errors into messages for users; removes the temporary folder, unless others still write in
        it."""
        try:
            yield
        except BaseException as error:
            if self.group.alone:
                self._remove_temporary(temporary)
            if isinstance(error, OSError):
                raise ResourceError(self._explanation(step, needed_bytes, error)) from error
            raise

    def _explanation(self, step: int, needed_bytes: int, error: OSError) -> str:
        what = f"{self.folder}: the checkpoint of step {step} cannot be written"
        remaining, count = self._remaining_checkpoints()
        if error.errno not in _NO_SPACE_ERRORS:
            return f"{what}: {error.strerror or error} ({error.filename or self.folder}). {remaining}"
        free = shutil.disk_usage(self.folder).free
        missing = (
            f"{format_bytes(needed_bytes - free)} are missing"
            if free < needed_bytes
            else f"but writing stopped ({os.strerror(error.errno)}): a quota, a file-size limit, or another writer"
        )
        return (
            f"{what}: it needs {format_bytes(needed_bytes)}, {format_bytes(free)} are free, {missing}. {remaining} "
            f"Free some space{', or keep fewer checkpoints (checkpoint.keep)' if count > 1 else ''}, and start the run "
            "again: it resumes."
        )

    def _remaining_checkpoints(self) -> tuple[str, int]:
        """Returns (a sentence on the newest checkpoint, the number of checkpoints)."""
        with contextlib.suppress(OSError):  # a folder that cannot even be read has nothing to report
            steps = [info.step for info in list_checkpoints(self.folder) if info.complete]
            if steps:
                return f"The checkpoint of step {steps[-1]} stays.", len(steps)
        return "There is no earlier checkpoint.", 0


@dataclass
class _Draft:
    """One process's part of a checkpoint: the tensors that it writes, laid out in shard files."""

    tensors: Groups
    state: dict[str, Any]
    boxes: Boxes
    group: Group
    plans: list[ShardPlan] = field(default_factory=list)
    state_json: bytes = b""

    def plan(self) -> int:
        """Plan the shard files of this process. Returns an upper estimate of the bytes it will write.

        Raises TypeError for state that JSON would change, ValueError for a group that cannot name a file.
        """
        _require_json(self.state, "state")
        for group in self.tensors:
            if not _GROUP_NAME.fullmatch(group):
                raise ValueError(f"{group!r}: a group is named in lower-case letters, digits and underscores")
        rank = None if self.group.alone else self.group.index
        for group, named in self.tensors.items():
            boxes = self.boxes.get(group, {})
            own = {name: tensor for name, tensor in named.items() if self._writes(tensor, boxes.get(name))}
            self.plans += plan_shards(group, own, boxes=boxes, rank=rank)
        self.state_json = json.dumps(self.state).encode() if self.group.index == 0 else b""
        count = sum(len(plan.offsets) for plan in self.plans)
        needed_bytes = sum(plan.bytes for plan in self.plans) + count * _MANIFEST_BYTES_PER_TENSOR
        return needed_bytes + (len(self.state_json) + (1 << 16) if self.group.index == 0 else 0)

    def write(self, folder: Path) -> list[Shard]:
        """Write the planned files into `folder`, not yet flushed. Raises ResourceError where it cannot be seen."""
        if not self.group.alone and not folder.is_dir():
            raise ResourceError(
                f"{folder}: not seen by rank {self.group.ranks[self.group.index]}, though rank {self.group.ranks[0]} "
                "has made it. All processes of a run need one `output` folder, on a disk that their machines share."
            )
        threads = min(WRITING_THREADS, torch.get_num_threads())
        return [write_shard(folder, plan, self.tensors[plan.group], threads) for plan in self.plans]

    def _writes(self, tensor: Tensor, box: ShardBox | None) -> bool:
        """Whether this process saves a tensor: the first one saves tensors that all have, the writer of a box the
        box."""
        if box is None or not math.prod(box.global_shape):
            return self.group.index == 0
        return box.is_writer and (box.is_full or tensor.numel() > 0)


def _require_json(value: object, where: str) -> None:
    """Refuses values that JSON would bring back as something else: a resumed run would go on from a changed state."""
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
