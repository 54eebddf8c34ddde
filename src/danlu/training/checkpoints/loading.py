"""Loading a checkpoint: it is proved intact, matched with the run's tensors, and read box by box, whatever layout wrote
it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.core.errors import CheckpointError
from danlu.core.safetensors_format import torch_dtype
from danlu.core.shard_box import ShardBox
from danlu.parallel.comm import ALONE, Group
from danlu.training.agreement import agree
from danlu.training.checkpoints.folders import list_checkpoints, step_of
from danlu.training.checkpoints.manifest import STATE, Manifest, TensorEntry, read_manifest
from danlu.training.checkpoints.shard_files import read_box
from danlu.training.checkpoints.state_boxes import cannot_be_cut
from danlu.training.checkpoints.verification import verify

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group ("model", "optimizer", "ema") and name."""
Boxes = Mapping[str, Mapping[str, ShardBox]]
"""The box of the whole that a tensor of this process is, by group and name; tensors that are left out are whole."""

_IN_BLOCKS = "in blocks, which cannot be resharded"
_ADVICE_FOR_BLOCKS = (
    "State that is kept in blocks of a shard (as 8-bit moments are) loads with the strategy and world size that saved "
    "it alone. Resume with that `parallel:` section, or start a new run from the weights with optimizer adamw: its "
    "state can be resharded."
)
_MAX_SHOWN = 10


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
    manifest = _intact_manifest(path, into, group)
    _require_fit(path, manifest, into, boxes, group)

    def read() -> None:
        for kind, tensors in into.items():
            _fill(path, manifest, kind, tensors, boxes.get(kind, {}))

    agree(group, read, lambda _: None)
    return _state_of(path)


def read_group(path: Path, group: str) -> dict[str, Tensor]:
    """All tensors of one group of the checkpoint at `path`, whole and newly made on the CPU. Raises CheckpointError."""
    manifest = _intact_manifest(path, [group], ALONE)
    tensors = _empty_tensors(manifest, group)
    _require_fit(path, manifest, {group: tensors}, {}, ALONE)
    _fill(path, manifest, group, tensors, {})
    return tensors


def read_state(path: Path) -> dict[str, Any]:
    """The state of the checkpoint at `path`, for deciding before any tensor is read. Raises CheckpointError."""
    _intact_manifest(path, [], ALONE)
    return _state_of(path)


def _state_of(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE).read_bytes())
    return state


def _intact_manifest(path: Path, groups: Iterable[str], among: Group) -> Manifest:
    """The manifest of a checkpoint with undamaged `groups`; the processes `among` share the work of proving it.

    Raises CheckpointError that names each damage and the newest older checkpoint that is intact.
    """
    groups = list(groups)

    def raise_damages(problems_by_rank: list[list[str]]) -> None:
        if problems := sorted(set(chain.from_iterable(problems_by_rank))):  # what several saw is said once
            raise CheckpointError("\n  ".join([f"{path} is damaged:", *problems]) + "\n" + _intact_older_one(path))

    agree(among, lambda: verify(path, groups, share=(among.index, among.size)), raise_damages)
    manifest = read_manifest(path)
    for group in groups:
        if group not in manifest.groups:
            raise CheckpointError(f"{path} has no tensors of {group!r}; it has {', '.join(manifest.groups)}.")
    return manifest


def _require_fit(path: Path, manifest: Manifest, into: Groups, boxes: Boxes, among: Group) -> None:
    """Raises CheckpointError if a process needs a tensor otherwise than it was saved, or no process needs one."""

    def compare() -> tuple[set[str], set[str]]:
        mismatches, unneeded = set(), set()
        for group, tensors in into.items():
            for name, problem in _mismatches(manifest, group, tensors, boxes.get(group, {})):
                mismatches.add(f"{group}.{name}: {problem}")
            for name in manifest.parts(group).keys() - tensors.keys():
                unneeded.add(f"{group}.{name}: the checkpoint has it, this run does not")
        return mismatches, unneeded

    def raise_mismatches(by_rank: list[tuple[set[str], set[str]]]) -> None:
        # A mismatch on any rank counts; a saved tensor is unneeded only where no rank at all has it.
        mismatches = set[str]().union(*(mismatches for mismatches, _ in by_rank))
        problems = sorted(mismatches | set.intersection(*(unneeded for _, unneeded in by_rank)))
        if problems:
            more = [f"and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
            lines = "\n  ".join([*problems[:_MAX_SHOWN], *more])
            advice = f"\n{_ADVICE_FOR_BLOCKS}" if any(_IN_BLOCKS in problem for problem in problems) else ""
            raise CheckpointError(f"{path} does not fit this run:\n  {lines}{advice}")

    agree(among, compare, raise_mismatches)


def _fill(
    path: Path, manifest: Manifest, group: str, tensors: Mapping[str, Tensor], boxes: Mapping[str, ShardBox]
) -> None:
    """Read each tensor's box out of all saved boxes that overlap it, after `_require_fit`.

    Files are opened one at a time, and those without anything for this process not at all.
    """
    for shard in manifest.shards:
        if shard.group != group:
            continue
        reads = [
            (entry, *source_and_target, tensors[name])
            for name, entry in shard.tensors.items()
            if name in tensors and (source_and_target := _overlap(entry, tensors[name], boxes.get(name))) is not None
        ]
        if not reads:
            continue
        fd = os.open(path / shard.file, os.O_RDONLY)
        try:
            for entry, source, target, tensor in reads:
                read_box(fd, entry, source, target.view_of(tensor.detach()))
        finally:
            os.close(fd)


def _empty_tensors(manifest: Manifest, group: str) -> dict[str, Tensor]:
    """Uninitialised whole CPU tensors for all of a group.

    State in parts that cannot be cut has no whole; there it is one like the first part, which `_require_fit` refuses.
    """
    return {
        name: torch.empty(first.box.global_shape if first.size is None else first.shape, dtype=torch_dtype(first.dtype))
        for name, (first, *_) in manifest.parts(group).items()
    }


def _intact_older_one(path: Path) -> str:
    """Advice for a damaged checkpoint: the newest older one that is intact, and how to continue from it."""
    damaged_step = step_of(path)
    older = [info for info in list_checkpoints(path.parent) if info.complete and info.step < damaged_step]
    for info in reversed(older):
        if not verify(info.path):
            return (
                f"Step {info.step} is intact. To go on from it, add to the `danlu train` command: --resume {info.path}"
            )
    return "No older checkpoint is intact. Give the run a new output folder to start again."


def _mismatches(
    manifest: Manifest, group: str, tensors: Mapping[str, Tensor], boxes: Mapping[str, ShardBox]
) -> Iterator[tuple[str, str]]:
    """Yields (name, problem) of each tensor of this process that the checkpoint lacks or has in another form."""
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
        saved_box, wanted = saved[0].box, "all of it" if needed.is_full else str(needed)
        return f"the checkpoint has {saved_box} of {list(saved_box.global_shape)} {_IN_BLOCKS}; this run needs {wanted}"
    if not needed.is_full and not tensor.numel():
        dtypes = [tensor.dtype]  # nothing is read; and of few elements a state may be kept otherwise than of many
    else:
        overlapping = [entry for entry in saved if entry.box.intersection(needed) is not None] or saved[:1]
        dtypes = [torch_dtype(entry.dtype) for entry in overlapping]
    saved_dtype = next((dtype for dtype in dtypes if dtype != tensor.dtype), tensor.dtype)
    has = _dtype_and_shape(saved_dtype, saved[0].box.global_shape)
    needs = _dtype_and_shape(tensor.dtype, needed.global_shape)
    return None if has == needs else f"the checkpoint has {has}, this run needs {needs}"


def _same_part(entry: TensorEntry, tensor: Tensor, box: ShardBox) -> bool:
    """Whether a saved part is a tensor of this process as it stands: the same box, shape and dtype."""
    return (
        entry.box.same_elements(box) and entry.shape == tuple(tensor.shape) and torch_dtype(entry.dtype) == tensor.dtype
    )


def _overlap(entry: TensorEntry, tensor: Tensor, box: ShardBox | None) -> tuple[ShardBox, ShardBox] | None:
    """The common elements of a saved part and a tensor of this process: (box in the saved part, box in the tensor)."""
    needed = _needed(tensor, box)
    if entry.size is not None or cannot_be_cut(needed, tensor):
        all_of_it = ShardBox.full(entry.shape)
        return (all_of_it, all_of_it) if tensor.numel() and _same_part(entry, tensor, needed) else None
    common = entry.box.intersection(needed)
    return None if common is None else (common.relative_to(entry.box), common.relative_to(needed))


def _needed(tensor: Tensor, box: ShardBox | None) -> ShardBox:
    return ShardBox.full(tensor.shape) if box is None or box.is_full else box


def _dtype_and_shape(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
