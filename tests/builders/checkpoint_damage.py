"""Checkpoints with a byte that is another, and what verification says of each."""

from __future__ import annotations

from pathlib import Path

from danlu.training.checkpoints.manifest import read_manifest
from danlu.training.checkpoints.verification import verify


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def check_every_tensor_and_header(path: Path) -> None:
    """A flipped byte in any tensor, or in the header of any file, is found and named, and nothing else is."""
    assert verify(path) == []
    for shard in read_manifest(path).shards:
        file = path / shard.file
        for name, entry in shard.tensors.items():
            if entry.bytes:
                flip(file, entry.offset + entry.bytes - 1)
                assert verify(path) == [f"{file}: tensor {entry.label(name)} was altered (SHA-256 differs)."]
                flip(file, entry.offset + entry.bytes - 1)
        flip(file, 9)
        assert verify(path) == [f"{file}: its header was altered."]
        flip(file, 9)
    assert verify(path) == []
