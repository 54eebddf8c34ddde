"""What becomes of processes that fail: the error that a user can do something about comes first."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.core.errors import DanluError, RecipeError, TrainingError
from danlu.verification.workers import _failure


def failed(folder: Path, name: str, error: DanluError | None, trace: str) -> Path:
    file = folder / f"{name}.failed"
    file.write_bytes(pickle.dumps((error, trace)))
    return file


def test_an_error_of_danlus_own_is_told_before_what_followed_from_it(tmp_path: Path) -> None:
    files = [
        failed(tmp_path, "layout-1", None, "RuntimeError: Connection closed by peer"),
        failed(tmp_path, "layout-0", RecipeError(["adapter: cannot be cut"]), "RecipeError"),
    ]
    error = _failure(files)
    assert isinstance(error, RecipeError) and error.problems == ["adapter: cannot be cut"]


def test_any_other_error_is_told_with_its_process_and_place(tmp_path: Path) -> None:
    error = _failure([failed(tmp_path, "reference-0", None, "Traceback ...\nKeyError: 'x'")])
    assert isinstance(error, TrainingError)
    assert "process reference-0" in str(error) and "KeyError: 'x'" in str(error)


@pytest.mark.slow
def test_files_of_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    cwd = tmp_path / "here"
    cwd.mkdir()
    for name in ("signal", "selectors", "tokenize", "regex"):
        (cwd / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    # A script that lies elsewhere, as the command does; and a new process: a fork server that runs would be used again.
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path; from danlu.verification.workers import _run_processes\n"
        "if __name__ == '__main__':\n    _run_processes(Path('.'), [('reference', 0)], 60)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=cwd, capture_output=True, text=True, env=os.environ)
    assert "process reference-0 of the verification failed" in done.stderr and "'task'" in done.stderr, (
        "there is no task"
    )
    assert not (tmp_path / "executed").exists()
