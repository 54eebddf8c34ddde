"""Files of lines that grow, on a disk that takes no more."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from danlu.core.errors import ResourceError
from danlu.core.line_log import LineLog, OptionalLineLog


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_an_optional_log_ends_no_run_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    said: list[str] = []
    log, needed = OptionalLineLog(tmp_path / "rollouts.jsonl", said.append), LineLog(tmp_path / "metrics.jsonl")
    log.append("1")

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for line in "23":
            log.append(line)
            log.sync()
        with pytest.raises(ResourceError):
            needed.append("1") if call == "write" else needed.sync()
    log.append("4")
    written = "1\n2\n" if call == "fsync" else "1\n"
    assert log.path.read_text() == written and log.lines == len(written) // 2
    log.truncate(1)  # for a run that goes on from an earlier checkpoint
    assert log.path.read_text() == "1\n"
    assert said == [
        f"{log.path}: cannot be written: No space left on device. Nothing more is written there in this run, and "
        "training goes on"
    ]
