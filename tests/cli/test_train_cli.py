"""`danlu train`: how many processes there may be, and how its recipe is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from danlu.cli import train
from danlu.cli.main import main
from danlu.core.errors import RecipeError


def test_more_processes_than_cores_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "usable_cores", lambda: 2)
    monkeypatch.setattr(train, "total_memory_bytes", lambda: 4 << 30)
    train.check_processes(2, [])
    assert capsys.readouterr() == ("", "")
    train.check_processes(6, [])
    assert capsys.readouterr().err == (
        "6 processes share 2 cores: they take turns, so this is slower than --processes 2, and starting them takes 3 "
        "times as long\n"
    )
    train.check_processes(32, [])
    with pytest.raises(RecipeError, match="--processes 33: each takes 128 MiB before .* has 4 GiB in all. Use 2, as"):
        train.check_processes(33, [])


def test_a_wrong_recipe_is_told_without_numpy_and_torch() -> None:
    """They take a tenth of a second and more than one; `danlu.data.token_cache` is the control: it brings numpy."""
    for module, loaded in (("danlu.cli.train", "[]"), ("danlu.data.token_cache", "['numpy']")):
        seen = f"import sys, {module}; print([name for name in ('numpy', 'torch') if name in sys.modules])"
        done = subprocess.run([sys.executable, "-P", "-c", seen], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == loaded, module


@pytest.mark.parametrize("verb", ["train", "explain"])
def test_a_recipe_is_parsed_once(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    composed = list[Any]()
    real = yaml.SafeLoader.get_single_node

    def counted(loader: yaml.SafeLoader) -> Any:
        composed.append(real(loader))
        return composed[-1]

    monkeypatch.setattr(yaml.SafeLoader, "get_single_node", counted)
    recipe = tmp_path / "sft.yaml"
    recipe.write_text("stage: sft\nsteps: ten\n")
    overrides = ["seed=1", "log.every=2"]  # one document of YAML each: the control
    arguments = [str(recipe), *overrides] if verb == "train" else ["steps", *overrides, "--recipe", str(recipe)]
    assert main([verb, *arguments]) == 2
    assert f"{recipe}:2:8 steps: expected a whole number" in capsys.readouterr().err
    assert len(composed) == 1 + len(overrides)
