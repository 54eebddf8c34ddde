"""The safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes. No torch here.

danlu reads and writes the byte ranges itself, because mapping a file into memory counts every touched page as resident
until the whole file is let go: loading by ranges needs no more memory than the weights (see benchmarks/loading.py).
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.errors import ModelError
from danlu.small_files import check_regular, parse_json

# Widths of the types that are floating-point weights; the rest are known so that a message can name them.
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_WIDTHS = FLOAT_BYTES | {"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "I32": 4, "I64": 8, "I8": 1, "U8": 1}
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `bytes` bytes at `offset` of `file`, row-major, little-endian."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def read_header(file: Path) -> dict[str, Stored]:
    """Name -> place of every tensor in a safetensors file. Raises ModelError if it is truncated or malformed."""
    try:
        check_regular(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _LONGEST_HEADER:
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
    stored = {name: _stored(file, name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}
    before: Stored | None = None
    for name, one in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if before is not None and one.offset < before.offset + before.bytes:
            raise ModelError(f"{file}: broken safetensors header: tensor {name} lies over another one's bytes")
        before = one
    last = max(stored.values(), key=lambda one: one.offset + one.bytes, default=None)
    if last is not None and last.offset + last.bytes > size:
        lost = next(name for name, one in stored.items() if one.offset + one.bytes > size)
        raise ModelError(
            f"{file}: truncated: the header promises {last.offset + last.bytes} bytes, the file has {size}; "
            f"tensor {lost} is cut off. Copy or download the file again"
        )
    return stored


def _stored(file: Path, name: str, entry: Any, start: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: broken safetensors header at tensor {name}: {error!r}") from None
    width = _WIDTHS.get(dtype)
    if begin < 0 or begin > end or (width is not None and end - begin != math.prod(shape) * width):
        raise ModelError(
            f"{file}: tensor {name}: {end - begin} bytes stored, but shape {list(shape)} of {dtype} does not take that"
        )
    return Stored(file, dtype, shape, start + begin, end - begin)


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], room: int = 0
) -> bytes:
    """The first bytes of a file that holds these (name, dtype, shape) one after the other; filled up to `room`."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * _WIDTHS[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(room - 8)
    text += b" " * (-len(text) % 8)  # readers that map the file want the data aligned
    return struct.pack("<Q", len(text)) + text
