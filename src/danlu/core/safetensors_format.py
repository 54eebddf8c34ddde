"""The safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes.

The one codec of model folders, quantized folders and checkpoints (small files, adapters and LeNet-5, go through the
safetensors package). danlu reads and writes the byte ranges itself, because mapping a file into memory counts every
touched page as resident until the whole file is let go: loading by ranges needs no more memory than the weights (see
benchmarks/loading.py). Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from danlu.core.errors import ModelError
from danlu.core.small_files import check_regular, parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_T = TypeVar("_T")

BUFFER_BYTES = 1 << 22
"""The size of the buffer that reading and writing weights need in addition to the model itself."""
STAGING_BYTES = 16 << 20
"""Bytes of a checkpoint's tensor that are written or read at a time; those of a GPU pass a buffer of this size."""
WRITING_THREADS = 8
"""The most threads that write tensors of a checkpoint at once."""
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
"""Types that weights may have; the others are known for codes, optimizer state and messages."""
_DTYPES = {  # the format's name -> torch's, and bytes of an element
    "BF16": ("bfloat16", 2),
    "BOOL": ("bool", 1),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
}
_DTYPE_NAMES = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}
_COPIED_BYTES = 16 << 20
"""The bytes that are copied at a time."""
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor: `bytes` bytes at `offset` of `file`, row-major, little-endian."""

    file: Path
    dtype: str
    """The dtype as safetensors names it: "F32", "BF16", ..."""
    shape: tuple[int, ...]
    offset: int
    bytes: int


def has_name(dtype: torch.dtype) -> bool:
    """Whether the format has a name for a torch dtype."""
    return str(dtype).removeprefix("torch.") in _DTYPE_NAMES


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a torch dtype. Raises KeyError for one that it has no name for."""
    return _DTYPE_NAMES[str(dtype).removeprefix("torch.")]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name of the format. Raises KeyError for one that torch, or danlu, does not know."""
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPES[name][0])
    return dtype


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, to read into or to write from."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_header(file: Path) -> dict[str, TensorLocation]:
    """Name -> location of every tensor in a safetensors file. Raises ModelError if it is truncated or malformed."""
    try:
        check_regular(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ModelError(f"{file}: not a safetensors file (its first 8 bytes are no header length)")
        if 8 + length > size:
            raise ModelError(f"{file}: truncated: the header alone is {8 + length} bytes, the file has {size}")
        text = handle.read(length)
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise ModelError(f"{file}: broken safetensors header: {error}") from None
    if not isinstance(entries, dict):
        raise ModelError(f"{file}: broken safetensors header: expected an object")
    entries.pop("__metadata__", None)
    locations = {name: _location(file, name, entry, 8 + length) for name, entry in entries.items()}
    end = 0
    for name, location in sorted(locations.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if location.offset < end:
            raise ModelError(f"{file}: broken safetensors header: tensor {name} lies over another one's bytes")
        end = location.offset + location.bytes
    if end > size:
        lost = next(name for name, location in locations.items() if location.offset + location.bytes > size)
        raise ModelError(
            f"{file}: truncated: the header promises {end} bytes, the file has {size}; "
            f"tensor {lost} is cut off. Copy or download the file again"
        )
    return locations


def _location(file: Path, name: str, entry: Any, start: int) -> TensorLocation:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: broken safetensors header at tensor {name}: {error!r}") from None
    known = _DTYPES.get(dtype)
    if begin < 0 or begin > end or (known is not None and end - begin != math.prod(shape) * known[1]):
        raise ModelError(
            f"{file}: tensor {name}: {end - begin} bytes stored, but shape {list(shape)} of {dtype} does not take that"
        )
    return TensorLocation(file, dtype, shape, start + begin, end - begin)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], reserved_bytes: int = 0) -> bytes:
    """The first bytes of a file that holds these (name, dtype, shape) one after the other.

    reserved_bytes: the length to fill up to, a multiple of 8.
    """
    return _encode(
        ((name, dtype, shape, math.prod(shape) * _DTYPES[dtype][1]) for name, dtype, shape in tensors), reserved_bytes
    )


def copy_without(file: Path, target: Path, left_out: Collection[str]) -> None:
    """Writes a file with the tensors of another one but some, byte for byte, in little memory.

    Raises ModelError where `file` is malformed, and OSError.
    """
    kept = {name: location for name, location in read_header(file).items() if name not in left_out}
    with file.open("rb") as source, target.open("wb") as copy:
        copy.write(_encode((name, at.dtype, at.shape, at.bytes) for name, at in kept.items()))
        for location in kept.values():
            source.seek(location.offset)
            for start in range(0, location.bytes, _COPIED_BYTES):
                copy.write(source.read(min(_COPIED_BYTES, location.bytes - start)))


def _encode(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], reserved_bytes: int = 0) -> bytes:
    """The header of (name, dtype, shape, bytes)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers looks for
    offset = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(reserved_bytes - 8)
    text += b" " * (-len(text) % 8)  # the format wants the data to start at a multiple of 8: readers map the file
    return struct.pack("<Q", len(text)) + text


def fill_shards(sized: Iterable[tuple[_T, int]], shard_bytes: int) -> list[list[_T]]:
    """(thing, its bytes) in order -> shards of at most `shard_bytes`; a larger thing has a shard of its own."""
    shards: list[list[_T]] = []
    free_bytes = 0
    for thing, size_bytes in sized:
        if not shards or size_bytes > free_bytes:
            shards.append([])
            free_bytes = shard_bytes
        shards[-1].append(thing)
        free_bytes -= size_bytes
    return shards


def shard_name(stem: str, number: int, count: int) -> str:
    """The file name of shard `number`, from 1 on, of `count`."""
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"
