"""Small files are whole or not there, and nothing beside them is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.core import atomic_write
from danlu.core.atomic_write import UNFINISHED, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_what_others_call_tmp_stays(tmp_path: Path) -> None:
    (tmp_path / "page.html.tmp").write_text("a stranger's")
    (tmp_path / "page.html").write_text("old")
    write_atomically(tmp_path / "page.html", b"new")
    assert (tmp_path / "page.html.tmp").read_text() == "a stranger's"
    assert (tmp_path / "page.html").read_text() == "new"
    assert names(tmp_path) == ["page.html", "page.html.tmp"]


def test_what_cannot_be_written_leaves_the_old_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.html").write_text("old")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_write, "sync_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "page.html", b"new")
    assert names(tmp_path) == ["page.html"] and (tmp_path / "page.html").read_text() == "old"


def test_what_a_kill_left_is_cleared_away_and_what_a_living_process_writes_is_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = [f".page.html.danlu-{pid}.tmp" for pid in (dead.pid, os.getpid(), os.getppid())]
    for name in (*left, f".other.html.danlu-{dead.pid}.tmp"):
        assert UNFINISHED.fullmatch(name)
        (tmp_path / name).write_text("half")
    write_atomically(tmp_path / "page.html", b"new")
    assert names(tmp_path) == sorted(["page.html", left[2], f".other.html.danlu-{dead.pid}.tmp"])
