"""The commented recipes and chat templates that come with danlu: listed, and copied to be edited."""

from __future__ import annotations

from pathlib import Path

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.shipped_files import shipped_folder, template_path, templates
from danlu.core.spelling import did_you_mean


def shipped() -> dict[str, str]:
    """Names of the recipes and the first comment line of each."""
    recipes = {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}
    return {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in recipes.items()}


def copy(name: str, to: Path) -> Path:
    """Writes a shipped recipe to `to` (a file, or a folder to put it in); an existing file is never overwritten.

    Returns the file. Raises RecipeError for an unknown name or an existing file, ResourceError if it cannot be written.
    """
    names = list(shipped())
    if name not in names:
        raise RecipeError(f"no recipe called {name!r}.{did_you_mean(name, names)} There are: {', '.join(names)}")
    return _copied(shipped_folder() / f"{name}.yaml", to, f"danlu recipes copy {name}")


def copy_template(name: str, to: Path) -> Path:
    """Writes a chat template to `to`, and raises, as `copy` does a recipe."""
    names = list(templates())
    if name not in names:
        raise RecipeError(f"no chat template called {name!r}.{did_you_mean(name, names)} There are: {', '.join(names)}")
    return _copied(template_path(name), to, f"danlu recipes templates {name}")


def _copied(source: Path, to: Path, command: str) -> Path:
    target = to / source.name if to.is_dir() else to
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RecipeError(f"{target} exists already; name another file: {command} FILE") from None
    except OSError as error:
        raise ResourceError(f"{target} cannot be written: {error.strerror}") from None
    return target
