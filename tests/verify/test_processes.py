"""What becomes of processes that fail: the error that a user can do something about comes first."""

from __future__ import annotations

import pickle
from pathlib import Path

from danlu.errors import DanluError, RecipeError, TrainingError
from danlu.verify.processes import _failure


def failed(folder: Path, name: str, error: DanluError | None, trace: str) -> Path:
    file = folder / f"{name}.failed"
    file.write_bytes(pickle.dumps((error, trace)))
    return file


def test_an_error_of_danlus_own_is_told_before_what_followed_from_it(tmp_path: Path) -> None:
    files = [
        failed(tmp_path, "many-1", None, "RuntimeError: Connection closed by peer"),
        failed(tmp_path, "many-0", RecipeError(["adapter: cannot be cut"]), "RecipeError"),
    ]
    error = _failure(files)
    assert isinstance(error, RecipeError) and error.problems == ["adapter: cannot be cut"]


def test_any_other_error_is_told_with_its_process_and_place(tmp_path: Path) -> None:
    error = _failure([failed(tmp_path, "one-0", None, "Traceback ...\nKeyError: 'x'")])
    assert isinstance(error, TrainingError)
    assert "process one-0" in str(error) and "KeyError: 'x'" in str(error)
