"""Hashing a checkpoint again: one line for each damage, with the file and the tensor it is in. Needs no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from pathlib import Path

from danlu.core.errors import CheckpointError
from danlu.core.machine import usable_cores
from danlu.training.checkpoints.manifest import STATE, Manifest, Shard, coverage_problems, read_manifest
from danlu.training.units import first_few

_HASH_CHUNK_BYTES = 4 << 20


def verify(path: Path, groups: Iterable[str] | None = None, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Hash the checkpoint at `path` again, on all cores; one line for each damage, none when it is intact.

    Args:
        groups  verify only the tensors of these (and the state and the manifest); None: of all
        share   (number, count) of this process among several that verify together. Each hashes a share of the tensors;
                together they find the damages that one alone would find.
    A line names the file and, where the damage lies in a tensor's bytes, the tensor.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = _state_problems(path, manifest)
    shards = [shard for shard in manifest.shards if groups is None or shard.group in groups]
    problems += [f"{path}: {problem}" for group in manifest.groups for problem in coverage_problems(group, shards)]
    own_names = _own_share(shards, *share)
    # Threads are enough: hashlib and pread release the interpreter lock.
    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        for shard in shards:
            problems += _shard_problems(path / shard.file, shard, own_names[shard.file], pool)
    return problems


def _state_problems(path: Path, manifest: Manifest) -> list[str]:
    try:
        content = (path / STATE).read_bytes()
    except FileNotFoundError:
        return [f"{path / STATE}: missing."]
    if hashlib.sha256(content).hexdigest() != manifest.state_sha256:
        return [f"{path / STATE}: altered ({len(content):,} bytes, {manifest.state_bytes:,} were written)."]
    return []


def _own_share(shards: Sequence[Shard], number: int, count: int) -> dict[str, set[str | None]]:
    """The tensors that process `number` of `count` hashes, by file, None for the header; about as many bytes each."""
    jobs: list[tuple[int, str, str | None]] = []
    for shard in shards:
        jobs.append((shard.header_bytes, shard.file, None))
        jobs += [(entry.bytes, shard.file, name) for name, entry in shard.tensors.items()]
    own_names: dict[str, set[str | None]] = {shard.file: set() for shard in shards}
    # The largest job goes to the process with the least so far; sorting is stable, so all processes deal alike.
    loads = [(0, process) for process in range(count)]
    for size, file, name in sorted(jobs, key=lambda job: -job[0]):
        load, process = heappop(loads)
        heappush(loads, (load + size, process))
        if process == number:
            own_names[file].add(name)
    return own_names


def _shard_problems(file: Path, shard: Shard, names: Collection[str | None], pool: ThreadPoolExecutor) -> list[str]:
    """Damages of one shard file; `names` are the tensors to hash, None for the header."""
    try:
        fd = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        lost = [entry.label(name) for name, entry in shard.tensors.items()]
        return [f"{file}: missing; it held {first_few(lost, 'more tensors')}."]
    try:
        size = os.fstat(fd).st_size
        if size != shard.bytes:
            return [f"{file}: {size:,} bytes, {shard.bytes:,} were written."]
        header = pool.submit(_hash_range, fd, 0, shard.header_bytes) if None in names else None
        hashes = {
            name: pool.submit(_hash_range, fd, entry.offset, entry.bytes)
            for name, entry in shard.tensors.items()
            if name in names
        }
        problems = []
        if header is not None and header.result() != shard.header_sha256:
            problems.append(f"{file}: its header was altered.")
        problems += [
            f"{file}: tensor {shard.tensors[name].label(name)} was altered (SHA-256 differs)."
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
