"""Reading a checkpoint: proved intact, matched with what a run needs, and box by box, whichever layout wrote it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.errors import CheckpointError
from danlu.parallel.comm import ALONE, Group
from danlu.shard_box import ShardBox
from danlu.train.agreement import agree
from danlu.train.checkpoints.manifest import (
    STATE,
    Manifest,
    TensorEntry,
    list_checkpoints,
    read_manifest,
    step_of,
    verify,
)
from danlu.train.checkpoints.shard_files import DTYPES, cannot_be_cut, read_box

Groups = Mapping[str, Mapping[str, Tensor]]
"""By group ("model", "optimizer", "ema") and name."""
Boxes = Mapping[str, Mapping[str, ShardBox]]
"""By group and name, the box of the whole that a tensor of this process is; what is left out is whole."""

_IN_BLOCKS = "in blocks, which cannot be resharded"
_ADVICE_FOR_BLOCKS = (
    "State that is kept in blocks of a shard (as 8-bit moments are) loads with the strategy and world size that saved "
    "it alone. Resume with that `parallel:` section, or start a new run from the weights with optimizer adamw, whose "
    "state can be resharded."
)
_MOST_SHOWN = 10


def load_checkpoint(path: Path, into: Groups, boxes: Boxes | None = None, group: Group = ALONE) -> dict[str, Any]:
    """Copy tensors of the checkpoint at `path` into existing ones, and return its state.

    Args:
        into   the groups to load, each with every tensor the checkpoint has for it: same names, dtypes, whole shapes
        boxes  the box of the whole that a tensor is, whatever boxes it was saved in; one without is whole
        group  processes that load together, each its own boxes; they share the work of proving hashes
    Nothing is touched before all hashes have been proved and all tensors been matched. Raises CheckpointError that
    names each damage and the newest older checkpoint that is intact, or each tensor that does not match.
    """
    boxes = boxes or {}
    manifest = intact_manifest(path, into, group)
    require_fit(path, manifest, into, boxes, group)

    def read() -> None:
        for kind, tensors in into.items():
            fill(path, manifest, kind, tensors, boxes.get(kind, {}))

    agree(group, read, lambda _: None)
    return _state_of(path)


def read_group(path: Path, group: str) -> dict[str, Tensor]:
    """All tensors of one group of the checkpoint at `path`, whole and newly made on the CPU. Raises CheckpointError."""
    manifest = intact_manifest(path, [group], ALONE)
    tensors = empty_tensors(manifest, group)
    require_fit(path, manifest, {group: tensors}, {}, ALONE)
    fill(path, manifest, group, tensors, {})
    return tensors


def read_state(path: Path) -> dict[str, Any]:
    """The state of the checkpoint at `path`, for deciding before any tensor is read. Raises CheckpointError."""
    intact_manifest(path, [], ALONE)
    return _state_of(path)


def _state_of(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE).read_bytes())
    return state


def intact_manifest(path: Path, groups: Iterable[str], among: Group) -> Manifest:
    """The manifest of a checkpoint whose `groups` are undamaged; the processes `among` share the work of proving it.

    Raises CheckpointError that names each damage and the newest older checkpoint that is intact.
    """
    groups = list(groups)

    def judge(found: list[list[str]]) -> None:
        if problems := sorted(set(chain.from_iterable(found))):  # what several have found is told once
            raise CheckpointError("\n  ".join([f"{path} is damaged:", *problems]) + "\n" + _way_out(path))

    agree(among, lambda: verify(path, groups, share=(among.index, among.size)), judge)
    manifest = read_manifest(path)
    for group in groups:
        if group not in manifest.groups:
            raise CheckpointError(f"{path} has no tensors of {group!r}; it has {', '.join(manifest.groups)}.")
    return manifest


def require_fit(path: Path, manifest: Manifest, into: Groups, boxes: Boxes, among: Group) -> None:
    """Raises CheckpointError if a process needs a tensor otherwise than it was saved, or no process needs one."""

    def compare() -> tuple[set[str], set[str]]:
        wrong, unknown = set(), set()
        for group, tensors in into.items():
            found = _mismatches(manifest, group, tensors, boxes.get(group, {}))
            wrong |= {f"{group}.{name}: {problem}" for name, problem in found}
            others = manifest.parts(group).keys() - tensors.keys()
            unknown |= {f"{group}.{name}: the checkpoint has it, this run does not" for name in others}
        return wrong, unknown

    def judge(found: list[tuple[set[str], set[str]]]) -> None:
        wrong = set[str]().union(*(wrong for wrong, _ in found))
        problems = sorted(wrong | set.intersection(*(unknown for _, unknown in found)))
        if problems:
            more = [f"and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
            lines = "\n  ".join([*problems[:_MOST_SHOWN], *more])
            advice = f"\n{_ADVICE_FOR_BLOCKS}" if any(_IN_BLOCKS in problem for problem in problems) else ""
            raise CheckpointError(f"{path} does not fit this run:\n  {lines}{advice}")

    agree(among, compare, judge)


def fill(
    path: Path, manifest: Manifest, group: str, tensors: Mapping[str, Tensor], boxes: Mapping[str, ShardBox]
) -> None:
    """Read each tensor's box out of all saved boxes that have a part of it, after `require_fit`."""
    for shard in manifest.shards:
        if shard.group != group:
            continue
        needed = [
            (entry, *both, tensors[name])
            for name, entry in shard.tensors.items()
            if name in tensors and (both := _overlap(entry, tensors[name], boxes.get(name))) is not None
        ]
        if not needed:
            continue
        fd = os.open(path / shard.file, os.O_RDONLY)
        try:
            for entry, source, target, tensor in needed:
                read_box(fd, entry, source, tensor.detach()[target.slices])
        finally:
            os.close(fd)


def empty_tensors(manifest: Manifest, group: str) -> dict[str, Tensor]:
    """Uninitialised whole CPU tensors for all of a group; of one in parts that cannot be cut, which no run holds, one
    like the first of them.
    """
    return {
        name: torch.empty(first.box.global_shape if first.size is None else first.shape, dtype=DTYPES[first.dtype])
        for name, (first, *_) in manifest.parts(group).items()
    }


def _way_out(path: Path) -> str:
    """What to do about a damaged checkpoint: the newest older one that is intact, and how to go on from it."""
    damaged = step_of(path)
    older = [info for info in list_checkpoints(path.parent) if info.complete and info.step < damaged]
    for info in reversed(older):
        if not verify(info.path):
            return (
                f"Step {info.step} is intact. To go on from it, add to the `danlu train` command: --resume {info.path}"
            )
    return "No older checkpoint is intact. Give the run a new output folder to start again."


def _mismatches(
    manifest: Manifest, group: str, tensors: Mapping[str, Tensor], boxes: Mapping[str, ShardBox]
) -> Iterator[tuple[str, str]]:
    saved = manifest.parts(group)
    for name, tensor in tensors.items():
        if name in saved:
            if problem := _mismatch(saved[name], tensor, boxes.get(name)):
                yield name, problem
        elif tensor.numel() or name not in boxes:  # of a part with nothing in it, nothing was saved
            yield name, "this run needs it, the checkpoint does not have it"


def _mismatch(saved: Sequence[TensorEntry], tensor: Tensor, box: ShardBox | None) -> str | None:
    needed = _needed(tensor, box)
    if cannot_be_cut(needed, tensor) or any(entry.size is not None for entry in saved):
        if not tensor.numel() or any(_same_part(entry, tensor, needed) for entry in saved):
            return None
        here = "all of it" if needed.is_full else str(needed)
        saved_box = saved[0].box
        return f"the checkpoint has {saved_box} of {list(saved_box.global_shape)} {_IN_BLOCKS}; this run needs {here}"
    if not needed.is_full and not tensor.numel():
        dtypes = [tensor.dtype]  # nothing is read; and of few elements a state may be kept otherwise than of many
    else:
        read = [entry for entry in saved if entry.box.intersection(needed) is not None] or saved[:1]
        dtypes = [DTYPES[entry.dtype] for entry in read]
    odd = next((dtype for dtype in dtypes if dtype != tensor.dtype), tensor.dtype)
    expected = _spell(tensor.dtype, needed.global_shape)
    found = _spell(odd, saved[0].box.global_shape)
    return None if found == expected else f"the checkpoint has {found}, this run needs {expected}"


def _same_part(entry: TensorEntry, tensor: Tensor, box: ShardBox) -> bool:
    return entry.box.same_elements(box) and entry.shape == tuple(tensor.shape) and DTYPES[entry.dtype] == tensor.dtype


def _overlap(entry: TensorEntry, tensor: Tensor, box: ShardBox | None) -> tuple[ShardBox, ShardBox] | None:
    """What a saved part has of a tensor of this process: where it is in the one, and in the other."""
    needed = _needed(tensor, box)
    if entry.size is not None or cannot_be_cut(needed, tensor):
        whole = ShardBox.full(entry.shape)
        return (whole, whole) if tensor.numel() and _same_part(entry, tensor, needed) else None
    common = entry.box.intersection(needed)
    return None if common is None else (common.relative_to(entry.box), common.relative_to(needed))


def _needed(tensor: Tensor, box: ShardBox | None) -> ShardBox:
    return ShardBox.full(tensor.shape) if box is None or box.is_full else box


def _spell(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
