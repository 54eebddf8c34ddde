"""The recipes that come with danlu load once their files are there, and are copied without overwriting."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.core.errors import RecipeError, ResourceError
from danlu.recipe import Chain, library, load, load_recipe_or_chain


def test_names_and_first_lines() -> None:
    shipped = library.shipped()
    assert {"continue", "pretrain", "sft"} <= set(shipped)
    assert shipped["pretrain"] == "Pretrain a small model from scratch on your own text."


@pytest.mark.parametrize("name", [name for name in library.shipped() if name != "chain"])
def test_copies_load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy = library.copy(name, Path("."))
    assert copy == Path(f"{name}.yaml")
    with pytest.raises(RecipeError) as caught:
        load(copy)
    missing = [line.partition("no file or folder '")[2].partition("'")[0] for line in caught.value.problems]
    kinds = {line.split()[1].partition(".")[0] for line in caught.value.problems}
    assert kinds == ({"data"} if name == "lenet_mnist" else {"model", "data"}), "model and data are told at once"
    for path in missing:
        Path(path).write_text("")
    assert load(copy).recipe.output == f"runs/{name}"


def test_the_copy_of_a_chain_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy = library.copy("chain", Path("."))
    with pytest.raises(RecipeError) as caught:
        load_recipe_or_chain(copy)
    for line in caught.value.problems:
        file = Path(line.partition("no file or folder '")[2].partition("'")[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    chain = load_recipe_or_chain(copy)
    assert isinstance(chain, Chain)
    assert [stage.loaded.recipe.output for stage in chain.stages] == [
        f"runs/chain/{each.name}" for each in chain.stages
    ]
    with pytest.raises(RecipeError, match=r"chain.yaml:\d+:1 stages: this is a chain of recipes"):
        load(copy)


def test_what_cannot_be_copied(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("mine")
    with pytest.raises(RecipeError, match="exists already; name another file: danlu recipes copy sft FILE"):
        library.copy("sft", tmp_path)
    assert (tmp_path / "sft.yaml").read_text() == "mine"
    with pytest.raises(RecipeError, match="no recipe called 'stf'. Did you mean 'sft'?"):
        library.copy("stf", tmp_path)
    with pytest.raises(ResourceError, match="cannot be written: No such file or directory"):
        library.copy("sft", tmp_path / "no" / "where.yaml")
