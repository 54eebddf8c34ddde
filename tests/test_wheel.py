"""A wheel has the package, the recipes, and the pages that `danlu explain` searches; nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from builders.docs_scripts import TOP

pytestmark = pytest.mark.slow


def built(source: Path, folder: Path) -> set[str]:
    """The names of the files in the wheel of a source tree; skips where the index has no hatchling."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("hatchling is not here, and no index has it")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("danlu-*.whl")
    return set(ZipFile(wheel).namelist())


def test_what_a_wheel_contains(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("src", "recipes", "docs"):
        shutil.copytree(TOP / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, source)
    names = {name for name in built(source, tmp_path / "wheel") if ".dist-info/" not in name}
    package = {f"danlu/{file.relative_to(source / 'src' / 'danlu')}" for file in (source / "src").rglob("*.*")}
    recipes = {f"danlu/recipe/shipped/{file.relative_to(source / 'recipes')}" for file in source.glob("recipes/**/*.*")}
    pages = {f"danlu/recipe/pages/{page.name}" for page in source.glob("docs/*.md") if page.name != "files.md"}
    assert len(pages) > 15 and len(recipes) > 20 and len(package) > 600
    assert names == package | recipes | pages
