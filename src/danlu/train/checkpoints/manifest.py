"""What a checkpoint folder is on disk: its names, its manifest, its mark; listing, verifying, choosing what to prune.

Nothing here needs torch, so `danlu checkpoint` answers at once::

    checkpoints/
      step-00000500/
        model-00001-of-00002.safetensors    tensors of the group "model", readable by any safetensors reader
        ...                                 or, of rank 3 of several, model-rank00003-00001-of-00002.safetensors
        state.json                          everything that is not a tensor
        manifest.json                       size of each file; dtype, shape, place and SHA-256 of each tensor, and
                                            which box of the whole it is, where it is a part
        COMPLETE                            the mark: SHA-256 of manifest.json, and what a listing shows
      .step-00000600.4711.tmp/              being written by process 4711 and those it works with
      .step-00000600.old/                   stands in for step 600 while that step is written again

The mark is written last, after everything else has reached the disk, so a folder without it is not a checkpoint. Each
hash covers one tensor (or one header), not one file: that names the tensor that was damaged, and lets all cores hash
one large file at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path, PurePath
from typing import Any

from danlu.errors import CheckpointError
from danlu.machine import usable_cores
from danlu.shard_box import ShardBox, find_gap, find_overlap

MARK = "COMPLETE"
MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 2
READABLE = (1, 2)  # format 1 has no boxes: every tensor is whole

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_ASIDE_FOLDER = re.compile(r"\.step-(\d{8,})\.old")
_HASH_CHUNK_BYTES = 4 << 20
_LOOKS = 5  # at a folder that changes meanwhile


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in its shard, and the hash of its bytes; of a part, which box of the whole it is."""

    dtype: str  # as safetensors names it: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    bytes: int
    sha256: str
    whole: tuple[int, ...] | None = None  # shape of the tensor that this is a part of; None: it is all there is
    start: tuple[int, ...] | None = None  # of the box, with `whole`
    size: tuple[int, ...] | None = None
    """Of the box, with `whole`, for what belongs to a box and has not its shape: it cannot be cut into other boxes."""

    @property
    def box(self) -> ShardBox:
        """Which elements of the whole tensor these are."""
        if self.whole is None or self.start is None:
            return ShardBox.full(self.shape)
        return ShardBox(self.whole, self.start, self.shape if self.size is None else self.size)

    def named(self, name: str) -> str:
        """For messages: a part with its box."""
        return name if self.whole is None else f"{name}{self.box}"


@dataclass(frozen=True)
class Shard:
    """One safetensors file. Header and tensors lie end to end, so their hashes cover every byte of it."""

    file: str
    group: str
    bytes: int
    header_bytes: int  # the 8 bytes of length included
    header_sha256: str
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class Manifest:
    step: int
    groups: tuple[str, ...]  # a group may be empty, and then has no shard
    shards: tuple[Shard, ...]
    state_bytes: int
    state_sha256: str

    def to_json(self) -> str:
        shards = [
            {**vars(shard), "tensors": {name: _fields(entry) for name, entry in shard.tensors.items()}}
            for shard in self.shards
        ]
        return json.dumps({"format": FORMAT, **vars(self), "shards": shards}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        fields = json.loads(text)
        if fields.pop("format") not in READABLE:
            raise ValueError("written by a newer danlu")
        shards = tuple(
            Shard(**{**shard, "tensors": {name: _tensor_entry(entry) for name, entry in shard["tensors"].items()}})
            for shard in fields.pop("shards")
        )
        for shard in shards:
            if shard.file != PurePath(shard.file).name or shard.file == "..":
                raise ValueError(f"{shard.file!r} is not the name of a file in this folder")
        return cls(groups=tuple(fields.pop("groups")), shards=shards, **fields)

    def tensors(self, group: str) -> dict[str, tuple[Shard, TensorEntry]]:
        """Every tensor of `group` by name, a part by name and box ("w[0:4, 0:8]"), with the shard that holds it."""
        return {
            entry.named(name): (shard, entry)
            for shard in self.shards
            if shard.group == group
            for name, entry in shard.tensors.items()
        }

    def parts(self, group: str) -> dict[str, list[TensorEntry]]:
        """The parts of every tensor of `group` by name; one that is whole is its only part."""
        found: dict[str, list[TensorEntry]] = {}
        for shard in self.shards:
            if shard.group == group:
                for name, entry in shard.tensors.items():
                    found.setdefault(name, []).append(entry)
        return found


@dataclass(frozen=True)
class CheckpointInfo:
    """One line of a listing. An incomplete checkpoint has no loss and no time of its own."""

    step: int
    path: Path
    complete: bool
    bytes: int
    loss: float | None  # evaluation loss at this step, where there was one
    time: float  # seconds since the epoch


def step_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_folder_name(step: int, pid: int) -> str:
    return f".{step_folder_name(step)}.{pid}.tmp"


def aside_folder_name(step: int) -> str:
    return f".{step_folder_name(step)}.old"


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Checkpoints in `folder` by rising step, incomplete ones included; empty when there is no such folder.

    The run may be training meanwhile: one that it prunes while this looks is not in the list, and the one that it saved
    before that is.
    """
    for _ in range(_LOOKS):
        before = _folders(folder)
        found = _look(folder)
        if _folders(folder) == before:
            break
    return found


def _look(folder: Path) -> list[CheckpointInfo]:
    found: dict[int, CheckpointInfo] = {}
    for entry in _folders(folder):
        if match := _STEP_FOLDER.fullmatch(entry.name):
            with suppress(CheckpointError):
                found[int(match[1])] = describe(entry, int(match[1]))
    for entry in _folders(folder):
        match = _ASIDE_FOLDER.fullmatch(entry.name)
        # Set aside by a save of the same step that was killed before its own mark: still the checkpoint of that step.
        if match and is_complete(entry) and not (int(match[1]) in found and found[int(match[1])].complete):
            with suppress(CheckpointError):
                found[int(match[1])] = describe(entry, int(match[1]))
    return [found[step] for step in sorted(found)]


def describe(path: Path, step: int) -> CheckpointInfo:
    """What the mark of the checkpoint at `path` says; for one without a mark, what lies there.

    A mark that cannot be read still counts as one: the checkpoint was complete once, and loading it must say that it
    is damaged rather than pass over it. Raises CheckpointError where there is nothing (any more).
    """
    try:
        mark = json.loads((path / MARK).read_bytes())
        return CheckpointInfo(step, path, True, int(mark["bytes"]), mark["loss"], float(mark["time"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        try:
            size = sum(_size(file) for file in path.glob("*"))
            return CheckpointInfo(step, path, is_complete(path), size, None, path.stat().st_mtime)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: there is no such checkpoint.") from None


def _size(file: Path) -> int:
    """Bytes of a file; none of a folder, nor of a file that is gone by now."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def is_complete(path: Path) -> bool:
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


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointError when it is missing, unmarked or altered."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such checkpoint.")
    try:
        mark = (path / MARK).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: half-written, it has no {MARK} marker: the run was stopped while saving it. It cannot be used."
        ) from None
    try:
        expected = json.loads(mark)["manifest_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MARK}: the marker is damaged ({error}).") from error
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path / MANIFEST}: missing.") from error
    found = hashlib.sha256(text).hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path / MANIFEST}: altered since it was written (SHA-256 {found[:12]}, the marker says {expected[:12]})."
        )
    try:
        return Manifest.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read by this version of danlu ({error}).") from error


def verify(path: Path, groups: Iterable[str] | None = None, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Hash the checkpoint at `path` again, on all cores; one line for each damage, none when it is intact.

    Args:
        groups  look only at the tensors of these (and at the state and the manifest); None = at all
        share   (number, of how many): of several processes that verify together, which this is. Each hashes a share of
                the tensors; what all of them find, taken together, is what one alone would find.
    A line names the file and, where the damage lies in a tensor's bytes, the tensor.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = _state_problems(path, manifest)
    wanted = [shard for shard in manifest.shards if groups is None or shard.group in groups]
    problems += [f"{path}: {problem}" for group in manifest.groups for problem in box_problems(group, wanted)]
    mine = _share(wanted, *share)
    # Threads are enough: hashlib and pread release the interpreter lock.
    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        for shard in wanted:
            problems += _shard_problems(path / shard.file, shard, mine[shard.file], pool)
    return problems


def box_problems(group: str, shards: Iterable[Shard]) -> list[str]:
    """Tensors of a group whose parts are not exactly the whole: something is in no file, or in two."""
    boxes: dict[str, list[TensorEntry]] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            # What cannot be cut is of a box that may have its like nowhere else: a moment in 8 bits here, in 32 there.
            if shard.group == group and entry.size is None:
                boxes.setdefault(name, []).append(entry)
    problems = []
    for name, entries in boxes.items():
        parts = [entry.box for entry in entries]
        whole = parts[0].global_shape
        if any(part.global_shape != whole for part in parts):
            problems.append(f"tensor {group}.{name} has parts of tensors of other shapes than {list(whole)}.")
        elif (twice := find_overlap(parts)) is not None:
            problems.append(f"tensor {group}.{name}: {twice} of {list(whole)} is in two files.")
        elif len(entries) > 1 and not math.prod(whole):
            problems.append(f"tensor {group}.{name} is in two files.")
        elif (missing := find_gap(whole, parts)) is not None:
            problems.append(f"tensor {group}.{name}: {missing} of {list(whole)} is in no file.")
    return problems


def to_prune(
    checkpoints: Sequence[CheckpointInfo], *, keep: int, keep_every: int | None = None, keep_best: bool = False
) -> list[CheckpointInfo]:
    """Complete checkpoints that nothing asks to keep, oldest first. Decides only; deletes nothing.

    Kept are the newest `keep`, every step that is a multiple of `keep_every`, and with `keep_best` the one with the
    lowest evaluation loss (the earliest of equals).
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
    """The complete checkpoint with the lowest evaluation loss; None when none has one."""
    judged = [(info.loss, info.step, info) for info in checkpoints if info.complete and info.loss is not None]
    return min(judged, key=lambda entry: entry[:2])[2] if judged else None


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: its mark first, so that a kill midway leaves nothing that looks whole."""
    (path / MARK).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=False)


def mark_text(manifest_text: str, *, total_bytes: int, loss: float | None, time: float) -> str:
    """Content of the mark. A loss that is not finite is no loss: it could never be the best."""
    return json.dumps(
        {
            "manifest_sha256": hashlib.sha256(manifest_text.encode()).hexdigest(),
            "bytes": total_bytes,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "time": time,
        }
    )


def _matched(path: Path) -> re.Match[str] | None:
    name = path.resolve().name
    return _STEP_FOLDER.fullmatch(name) or _ASIDE_FOLDER.fullmatch(name)


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _tensor_entry(values: dict[str, Any]) -> TensorEntry:
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return TensorEntry(**made)


def _fields(entry: TensorEntry) -> dict[str, Any]:
    return {name: value for name, value in vars(entry).items() if value is not None}


def _state_problems(path: Path, manifest: Manifest) -> list[str]:
    try:
        content = (path / STATE).read_bytes()
    except FileNotFoundError:
        return [f"{path / STATE}: missing."]
    if hashlib.sha256(content).hexdigest() != manifest.state_sha256:
        return [f"{path / STATE}: altered ({len(content):,} bytes, {manifest.state_bytes:,} were written)."]
    return []


def _share(shards: Sequence[Shard], number: int, of: int) -> dict[str, set[str | None]]:
    """By file, the tensors that one of several processes hashes, None for the header; about as many bytes for each."""
    jobs: list[tuple[int, str, str | None]] = []
    for shard in shards:
        jobs.append((shard.header_bytes, shard.file, None))
        jobs += [(entry.bytes, shard.file, name) for name, entry in shard.tensors.items()]
    mine: dict[str, set[str | None]] = {shard.file: set() for shard in shards}
    loads = [(0, one) for one in range(of)]  # the largest goes to whoever has least so far: the same on every process
    for size, file, name in sorted(jobs, key=lambda job: -job[0]):
        load, taker = heappop(loads)
        heappush(loads, (load + size, taker))
        if taker == number:
            mine[file].add(name)
    return mine


def _shard_problems(file: Path, shard: Shard, mine: Collection[str | None], pool: ThreadPoolExecutor) -> list[str]:
    """mine: what is hashed of it, None for the header."""
    try:
        fd = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        held = [entry.named(name) for name, entry in shard.tensors.items()]
        return [f"{file}: missing; it held {_some(held)}."]
    try:
        size = os.fstat(fd).st_size
        if size != shard.bytes:
            return [f"{file}: {size:,} bytes, {shard.bytes:,} were written."]
        header = pool.submit(_hash_range, fd, 0, shard.header_bytes) if None in mine else None
        hashes = {
            name: pool.submit(_hash_range, fd, entry.offset, entry.bytes)
            for name, entry in shard.tensors.items()
            if name in mine
        }
        problems = []
        if header is not None and header.result() != shard.header_sha256:
            problems.append(f"{file}: its header was altered.")
        problems += [
            f"{file}: tensor {shard.tensors[name].named(name)} was altered (SHA-256 differs)."
            for name, digest in hashes.items()
            if digest.result() != shard.tensors[name].sha256
        ]
        return problems
    finally:
        os.close(fd)


def _hash_range(fd: int, offset: int, size: int) -> str:
    digest = hashlib.sha256()
    end = offset + size
    while offset < end:
        chunk = os.pread(fd, min(_HASH_CHUNK_BYTES, end - offset), offset)
        if not chunk:  # cut short while we read; the hash then differs, which is what the caller reports
            break
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more tensors" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
