"""Files that are read whole: what would hang or fill memory is an ordinary error."""

from __future__ import annotations

import builtins
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from danlu.core.small_files import parse_json, read_small, read_small_text


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"x" * 1024)
    assert read_small(file, 1024) == b"x" * 1024
    file.write_bytes(b"x" * 1025)
    with pytest.raises(OSError, match="larger than 1 KiB, the most that such a file may have") as caught:
        read_small(file, 1024)
    assert caught.value.filename == str(file)


def test_a_huge_file_is_not_read_beyond_the_bound(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    file.touch()
    os.truncate(file, 1 << 40)  # sparse
    with pytest.raises(OSError, match="larger than 2 MiB"):
        read_small(file, 2 << 20)


def test_what_is_no_file_is_told_without_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, bound = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(bound))
    opened: list[Any] = []
    real = builtins.open
    with monkeypatch.context() as patch:
        patch.setattr("io.open", lambda file, *rest, **more: opened.append(file) or real(file, *rest, **more))
        for path, kind in ((pipe, "a named pipe"), (bound, "a socket"), (Path("/dev/null"), "a device")):
            with pytest.raises(OSError, match=f"it is {kind}, not a file"):
                read_small(path)
        assert opened == []
        (tmp_path / "file").touch()
        read_small(tmp_path / "file")
        assert len(opened) == 1
    server.close()


def test_as_open_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(UnicodeDecodeError):
        read_small_text(tmp_path / "latin")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5000, "too many digits"),
        ("{", "Expecting property name"),
    ],
    ids=["lists", "objects", "digits", "broken"],
)
def test_what_json_cannot_read_is_one_error(text: str, said: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=said):
        parse_json(text)
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
