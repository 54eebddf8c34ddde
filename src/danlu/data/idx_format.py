"""Files in the idx format, in which MNIST and its relatives come: a big-endian header, then the array; often in gzip.

Header: two zero bytes, a type (8: unsigned bytes), the number of dimensions, and each of them in four bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from danlu.core.errors import DataError

_UNSIGNED_BYTES = 8


def read_idx(file: Path) -> np.ndarray:
    """The array in a file of unsigned bytes, whatever its shape: uint8, not to be written to.

    Raises DataError for a file that cannot be read, is of another format or type, or does not have the bytes that its
    header promises.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}. Copy or download the file again") from None
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{file}: not in the idx format: it begins with {content[:4].hex(' ') or 'nothing'}")
    kind, dimensions = content[2], content[3]
    if kind != _UNSIGNED_BYTES:
        raise DataError(f"{file}: idx of type {kind:#04x}; images and labels are unsigned bytes, 0x08")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{file}: truncated: the header of {start} bytes is cut off at {len(content)}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{file}: the header promises {' x '.join(map(str, shape))} = {math.prod(shape)} bytes, and "
            f"{len(content) - start} follow. Copy or download the file again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
