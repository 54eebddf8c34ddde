from __future__ import annotations

from pathlib import Path

import pytest

from danlu.core.errors import ModelError, ResourceError
from danlu.core.output_folder import refuse_existing, refuse_foreign_files, replace_folder, shortened


def refuse(folder: Path) -> None:
    refuse_foreign_files(folder, lambda name: name == "ours", holds="it holds other things", advice="Choose another.")


def test_a_folder_with_files_of_others_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "absent")
    for name in ("ours", ".recipe.yaml.danlu-12.tmp"):  # what a killed process left
        (tmp_path / name).touch()
    refuse(tmp_path)
    for number in range(7):
        (tmp_path / f"theirs-{number}").touch()
    message = r"it holds other things \(theirs-0, .*theirs-4 and 2 more\)\. Choose another\."
    with pytest.raises(ResourceError, match=message):
        refuse(tmp_path)


def test_a_target_is_absent_or_empty(tmp_path: Path) -> None:
    refuse_existing(tmp_path / "absent")
    refuse_existing(tmp_path)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for target in (tmp_path, tmp_path / "broken"):
        with pytest.raises(ResourceError, match="is there already"):
            refuse_existing(target)


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "result"
    for content in ("first", "second"):
        with replace_folder(folder, 10, own_file="config.json") as fresh:
            (fresh / "config.json").write_text(content)
        assert (folder / "config.json").read_text() == content
    with (
        pytest.raises(ResourceError, match="cannot be written"),
        replace_folder(folder, 10, own_file="config.json") as fresh,
    ):
        (fresh / "absent" / "config.json").write_text("third")
    assert (folder / "config.json").read_text() == "second" and [folder] == list(tmp_path.iterdir())


def test_what_is_no_model_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ModelError, match="something other than a model"), replace_folder(tmp_path, 0, own_file="x"):
        raise AssertionError("nothing may be written")
    with (
        pytest.raises(ResourceError, match="Nothing was written"),
        replace_folder(tmp_path / "new", 1 << 60, own_file="x"),
    ):
        raise AssertionError("nothing may be written")


def test_long_lists_are_shortened() -> None:
    assert shortened(["a"], 2) == "a" and shortened(["a", "b", "c"], 2) == "a, b and 1 more"
