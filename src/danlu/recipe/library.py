"""The commented recipes and chat templates that come with danlu: the repository's `recipes/`, which a wheel carries
inside the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from danlu.core.errors import DanluError, RecipeError, ResourceError
from danlu.core.spelling import did_you_mean


def folder() -> Path:
    """Returns the folder with the recipes: next to this file in an installed wheel, at the top of a checkout.

    Raises DanluError if there is neither.
    """
    file = Path(__file__).resolve()
    packaged, checkout = file.parent / "shipped", file.parents[3] / "recipes"
    for candidate in (packaged, checkout):
        if candidate.is_dir():
            return candidate
    raise DanluError(f"this installation of danlu has no recipes: neither {packaged} nor {checkout} is there")


def shipped() -> dict[str, str]:
    """Names of the recipes and the first comment line of each."""
    recipes = {path.stem: path for path in sorted(folder().glob("*.yaml"))}
    return {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in recipes.items()}


@cache
def templates() -> dict[str, str]:
    """Names of the chat templates and the comment at the start of each."""
    files = {path.stem: path for path in sorted((folder() / "templates").glob("*.jinja"))}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return {name: text.removeprefix("{#-").partition("-#}")[0].strip() for name, text in texts.items()}


def template_path(path: str) -> Path:
    """The file of a chat template: that of a name that comes with danlu, else the path as it is."""
    return folder() / "templates" / f"{path}.jinja" if path in templates() else Path(path).expanduser()


def copy(name: str, to: Path) -> Path:
    """Writes a shipped recipe to `to` (a file, or a folder to put it in); an existing file is never overwritten.

    Returns the file. Raises RecipeError for an unknown name or an existing file, ResourceError if it cannot be written.
    """
    names = list(shipped())
    if name not in names:
        raise RecipeError(f"no recipe called {name!r}.{did_you_mean(name, names)} There are: {', '.join(names)}")
    return _copied(folder() / f"{name}.yaml", to, f"danlu recipes copy {name}")


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
