"""Writing tensors to safetensors shards and reading boxes of them, without a second copy of the data in the process.

A shard's layout is known from shapes and dtypes alone, so it is planned first and each tensor then goes straight from
its memory to its place by pwrite(2), while the same thread hashes it. Tensors are independent of each other: several
threads write and hash different ones (both calls release the interpreter lock). Hashing costs the most: SHA-256 runs at
1.1 GB/s on a core with the SHA extensions, the page cache takes 4.7 GB/s (two-core Xeon).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.core.safetensors_format import (
    STAGING_BYTES,
    dtype_name,
    encode_header,
    fill_shards,
    has_name,
    raw_bytes,
    shard_name,
)
from danlu.core.shard_box import ShardBox
from danlu.training.checkpoints.manifest import Shard, TensorEntry
from danlu.training.checkpoints.state_boxes import cannot_be_cut

SHARD_BYTES = 4 << 30
_CHUNK_BYTES = STAGING_BYTES


@dataclass(frozen=True)
class ShardPlan:
    """One file to be written: its header, and where in it each tensor goes."""

    file: str
    group: str
    header: bytes
    offsets: dict[str, int]  # from the start of the file
    bytes: int
    boxes: Mapping[str, ShardBox] = field(default_factory=dict)  # of those tensors that are parts of larger ones


def plan_shards(
    group: str,
    tensors: Mapping[str, Tensor],
    shard_bytes: int = SHARD_BYTES,
    *,
    boxes: Mapping[str, ShardBox] | None = None,
    rank: int | None = None,
) -> list[ShardPlan]:
    """Lay `tensors` out in files of at most `shard_bytes` (more only for one larger tensor). Touches no tensor data.

    Args:
        boxes  which box of a whole each tensor is; one that has none is whole
        rank   number of this process among those that write files into one folder; None: it is the only one
    Raises TypeError for a dtype that safetensors has no name for.
    """
    for name, tensor in tensors.items():
        if not has_name(tensor.dtype):
            raise TypeError(f"{group}: tensor {name} has dtype {tensor.dtype}, which safetensors cannot hold")
    # Wide elements first, so that every tensor starts at a multiple of its element size and readers may map it.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    files = fill_shards(((name, tensors[name].nbytes) for name in names), shard_bytes)
    stem = group if rank is None else f"{group}-rank{rank:05d}"
    parts = {name: box for name, box in (boxes or {}).items() if not box.is_full}
    return [
        _plan_shard(shard_name(stem, number, len(files)), group, {n: tensors[n] for n in file}, parts)
        for number, file in enumerate(files, 1)
    ]


def write_shard(folder: Path, plan: ShardPlan, tensors: Mapping[str, Tensor], threads: int) -> Shard:
    """Write one planned shard into `folder` and return its manifest entry. The data may still be in the page cache."""
    fd = os.open(folder / plan.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    pool = ThreadPoolExecutor(max_workers=threads)
    try:
        _pwrite_all(fd, memoryview(plan.header), 0)
        jobs = {name: pool.submit(_write_tensor, fd, tensors[name], offset) for name, offset in plan.offsets.items()}
        hashes = {name: job.result() for name, job in jobs.items()}
    finally:
        # After an error the rest of the shard is worthless; the running writes must still end before the close.
        pool.shutdown(cancel_futures=True)
        os.close(fd)
    entries = {
        name: TensorEntry(
            dtype=dtype_name(tensors[name].dtype),
            shape=tuple(tensors[name].shape),
            offset=offset,
            bytes=tensors[name].nbytes,
            sha256=hashes[name],
            **_box_fields(plan.boxes.get(name), tensors[name]),
        )
        for name, offset in plan.offsets.items()
    }
    header_sha256 = hashlib.sha256(plan.header).hexdigest()
    return Shard(plan.file, plan.group, plan.bytes, len(plan.header), header_sha256, entries)


def read_box(fd: int, entry: TensorEntry, box: ShardBox, into: Tensor) -> None:
    """Fill `into` with a box of the tensor that `entry` describes, of the same shape and dtype, from an open shard.

    Only the bytes of the box are read, range by range: straight into `into` where that is contiguous memory of the
    CPU, else through a buffer of some rows. Raises EOFError when the file ends early.
    """
    target = into.detach()
    if target.device.type == "cpu" and target.is_contiguous():
        _read_ranges(fd, entry, box, target)
        return
    rows = max(1, _CHUNK_BYTES // max(1, target[:1].nbytes)) if target.ndim else 1
    for first in range(0, box.sizes[0] if box.sizes else 1, rows):
        part = box
        if box.sizes:
            offsets = (box.offsets[0] + first, *box.offsets[1:])
            part = ShardBox(box.global_shape, offsets, (min(rows, box.sizes[0] - first), *box.sizes[1:]))
        staged = torch.empty(part.sizes, dtype=target.dtype)
        _read_ranges(fd, entry, part, staged)
        (target[first : first + rows] if box.sizes else target).copy_(staged)


def _read_ranges(fd: int, entry: TensorEntry, box: ShardBox, target: Tensor) -> None:
    """Reads the ranges of a box one after the other into the memory of `target`, which is contiguous."""
    unfilled = raw_bytes(target)
    width = target.element_size()
    for offset, count in box.contiguous_ranges():
        _pread_all(fd, unfilled[: count * width], entry.offset + offset * width)
        unfilled = unfilled[count * width :]


def _box_fields(box: ShardBox | None, tensor: Tensor) -> dict[str, Any]:
    """The fields of a TensorEntry that say which box of a larger tensor it is; none for a whole one."""
    if box is None:
        return {}
    sizes = {"size": box.sizes} if cannot_be_cut(box, tensor) else {}
    return {"whole": box.global_shape, "start": box.offsets, **sizes}


def _plan_shard(file: str, group: str, tensors: Mapping[str, Tensor], parts: Mapping[str, ShardBox]) -> ShardPlan:
    header = encode_header((name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items())
    *offsets, end = accumulate((tensor.nbytes for tensor in tensors.values()), initial=len(header))
    boxes = {name: parts[name] for name in tensors if name in parts}
    return ShardPlan(file, group, header, dict(zip(tensors, offsets, strict=True)), end, boxes)


def _write_tensor(fd: int, tensor: Tensor, offset: int) -> str:
    """Writes a tensor's bytes from `offset` on; returns their SHA-256."""
    digest = hashlib.sha256()
    for chunk in _host_chunks(tensor):
        digest.update(chunk)
        _pwrite_all(fd, chunk, offset)
        offset += len(chunk)
    return digest.hexdigest()


def _host_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in row-major order; from CUDA through one pinned buffer, valid until the next chunk."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        whole = flat.numpy().data
        for start in range(0, len(whole), _CHUNK_BYTES):
            yield whole[start : start + _CHUNK_BYTES]
        return
    staging = torch.empty(min(_CHUNK_BYTES, flat.numel()), dtype=torch.uint8, pin_memory=flat.device.type == "cuda")
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        chunk = flat[start : start + _CHUNK_BYTES]
        staged = staging[: chunk.numel()]
        staged.copy_(chunk)
        yield staged.numpy().data


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data:  # a write may take less than it was given, and on Linux never takes 2 GiB
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _pread_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(fd, [data], offset)
        if count == 0:
            raise EOFError(f"{len(data)} bytes short")
        data, offset = data[count:], offset + count
