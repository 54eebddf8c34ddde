"""idx files are read as they are written, packed or not; broken ones are named."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from builders.digits import idx

from danlu.core.errors import DataError
from danlu.data.images import read_idx

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("name", ["a-ubyte", "a-ubyte.gz"])
def test_an_array_comes_back(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(gzip.compress(idx(ARRAY)) if name.endswith("gz") else idx(ARRAY))
    found = read_idx(file)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, ARRAY)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(found, ARRAY.transpose(0, 2, 1).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not in the idx format: it begins with nothing"),
        (b"\x89PNG\r\n", "not in the idx format: it begins with 89 50 4e 47"),
        (b"\0\0\x0d\x01\0\0\0\1" + bytes(4), "idx of type 0x0d; images and labels are unsigned bytes"),
        (b"\0\0\x08\x03\0\0", "truncated: the header of 16 bytes is cut off at 6"),
        (idx(ARRAY)[:-1], "promises 2 x 3 x 4 = 24 bytes, and 23 follow"),
        (idx(ARRAY) + b"\0", "promises 2 x 3 x 4 = 24 bytes, and 25 follow"),
    ],
)
def test_broken_files_are_named(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "broken"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_idx(file)
    assert str(file) in str(caught.value)


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.gz"
    for content in (gzip.compress(idx(ARRAY))[:-9], b"no archive", gzip.compress(idx(ARRAY))[:12] + bytes(40)):
        file.write_bytes(content)
        with pytest.raises(DataError, match="broken.gz: cannot be read: "):
            read_idx(file)
    with pytest.raises(DataError, match="missing: cannot be read: "):
        read_idx(tmp_path / "missing")
