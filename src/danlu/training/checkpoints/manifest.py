"""The manifest of a checkpoint: which tensors lie in which file, where in it, and the SHA-256 of each; and its mark.

Each hash covers one tensor (or one header), not one file: that names the tensor that was damaged, and lets all cores
hash one large file at once. Nothing here needs torch. How the folder is laid out is said in `folders.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from danlu.core.errors import CheckpointError
from danlu.core.shard_box import ShardBox, find_gap, find_overlap
from danlu.training.criterion import LOSS, Criterion

MARK = "COMPLETE"
MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 2
READABLE = (1, 2)  # format 1 has no boxes: every tensor is whole


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor in its shard file, and the hash of its bytes; for a shard, also its box of the whole.

    The fields are the keys of manifest.json; those that are None are left out there.
    """

    dtype: str  # as safetensors names it: "F32", "BF16", ...
    shape: tuple[int, ...]  # of what is in the file
    offset: int  # from the start of the file
    bytes: int
    sha256: str
    whole: tuple[int, ...] | None = None  # global shape of the tensor that this is a box of; None: it is all there is
    start: tuple[int, ...] | None = None  # offsets of the box, with `whole`
    size: tuple[int, ...] | None = None
    """Sizes of the box, with `whole`, for state that belongs to a box without having its shape: it cannot be cut
    further."""

    @property
    def box(self) -> ShardBox:
        """The elements of the whole tensor that these are, or belong to."""
        if self.whole is None or self.start is None:
            return ShardBox.full(self.shape)
        return ShardBox(self.whole, self.start, self.shape if self.size is None else self.size)

    def label(self, name: str) -> str:
        """The tensor's name for messages; of a part, with its box: "w[0:4, 0:8]"."""
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
    """All that is in a checkpoint: its shard files by group ("model", "optimizer", "ema"), and the state's hash."""

    step: int
    groups: tuple[str, ...]  # a group may be empty, and then has no shard
    shards: tuple[Shard, ...]
    state_bytes: int
    state_sha256: str

    def to_json(self) -> str:
        """The text of manifest.json."""
        shards = [
            {**vars(shard), "tensors": {name: _entry_fields(entry) for name, entry in shard.tensors.items()}}
            for shard in self.shards
        ]
        return json.dumps({"format": FORMAT, **vars(self), "shards": shards}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Reads the text that `to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        fields = json.loads(text)
        if fields.pop("format") not in READABLE:
            raise ValueError("written by a newer danlu")
        shards = tuple(
            Shard(**{**shard, "tensors": {name: _tensor_entry(entry) for name, entry in shard["tensors"].items()}})
            for shard in fields.pop("shards")
        )
        for shard in shards:
            # A manifest from elsewhere must not make a reader open files outside of its folder.
            if shard.file != PurePath(shard.file).name or shard.file == "..":
                raise ValueError(f"{shard.file!r} is not the name of a file in this folder")
        return cls(groups=tuple(fields.pop("groups")), shards=shards, **fields)

    def tensors(self, group: str) -> dict[str, tuple[Shard, TensorEntry]]:
        """Every tensor of `group` by its label (a part by name and box), with the shard file that holds it."""
        return {
            entry.label(name): (shard, entry)
            for shard in self.shards
            if shard.group == group
            for name, entry in shard.tensors.items()
        }

    def parts(self, group: str) -> dict[str, list[TensorEntry]]:
        """The saved parts of every tensor of `group` by name; one that is whole is its only part."""
        parts: dict[str, list[TensorEntry]] = {}
        for shard in self.shards:
            if shard.group == group:
                for name, entry in shard.tensors.items():
                    parts.setdefault(name, []).append(entry)
        return parts


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
    digest = hashlib.sha256(text).hexdigest()
    if digest != expected:
        raise CheckpointError(
            f"{path / MANIFEST}: altered since it was written (SHA-256 {digest[:12]}, the marker says {expected[:12]})."
        )
    try:
        return Manifest.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read by this version of danlu ({error}).") from error


def coverage_problems(group: str, shards: Iterable[Shard]) -> list[str]:
    """Yields one line for each tensor of a group if its saved parts are not exactly the whole: some of it is in no
    file, or in two."""
    entries_of: dict[str, list[TensorEntry]] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            # What cannot be cut belongs to a box that may have its like nowhere else: a moment in 8 bits, the
            # neighbour's in 32. Whether such state fits is seen when it is loaded.
            if shard.group == group and entry.size is None:
                entries_of.setdefault(name, []).append(entry)
    problems = []
    for name, entries in entries_of.items():
        boxes = [entry.box for entry in entries]
        whole = boxes[0].global_shape
        if any(box.global_shape != whole for box in boxes):
            problems.append(f"tensor {group}.{name} has parts of tensors of other shapes than {list(whole)}.")
        elif (overlap := find_overlap(boxes)) is not None:
            problems.append(f"tensor {group}.{name}: {overlap} of {list(whole)} is in two files.")
        elif len(entries) > 1 and not math.prod(whole):
            problems.append(f"tensor {group}.{name} is in two files.")
        elif (gap := find_gap(whole, boxes)) is not None:
            problems.append(f"tensor {group}.{name}: {gap} of {list(whole)} is in no file.")
    return problems


def mark_text(
    manifest_text: str,
    *,
    total_bytes: int,
    loss: float | None,
    time: float,
    criterion: Criterion = LOSS,
    value: float | None = None,
) -> str:
    """Content of the mark. A loss (a value) that is not finite is none: it could never be the best.

    value: of the criterion, which is written where it is another than the loss.
    """
    mark: dict[str, Any] = {
        "manifest_sha256": hashlib.sha256(manifest_text.encode()).hexdigest(),
        "bytes": total_bytes,
        "loss": _finite(loss),
        "time": time,
    }
    if criterion != LOSS:
        mark["judged"] = {**vars(criterion), "value": _finite(value)}
    return json.dumps(mark)


def judged(mark: Mapping[str, Any]) -> tuple[Criterion, float | None]:
    """Returns the criterion of a checkpoint's run and its value there, from the checkpoint's mark.

    Raises KeyError and TypeError for a mark that lacks them.
    """
    if "judged" not in mark:
        return LOSS, mark["loss"]
    entry = mark["judged"]
    return Criterion(str(entry["metric"]), bool(entry["higher_is_better"])), entry["value"]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _tensor_entry(fields: dict[str, Any]) -> TensorEntry:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return TensorEntry(**values)


def _entry_fields(entry: TensorEntry) -> dict[str, Any]:
    return {name: value for name, value in vars(entry).items() if value is not None}
