"""The commented recipes that come with danlu: the repository's `recipes/`, which a wheel carries inside the package."""

from __future__ import annotations

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


def copy(name: str, to: Path) -> Path:
    """Writes a shipped recipe to `to` (a file, or a folder to put it in); an existing file is never overwritten.

    Returns the file. Raises RecipeError for an unknown name or an existing file, ResourceError if it cannot be written.
    """
    source = folder() / f"{name}.yaml"
    names = list(shipped())
    if name not in names:
        raise RecipeError(f"no recipe called {name!r}.{did_you_mean(name, names)} There are: {', '.join(names)}")
    target = to / source.name if to.is_dir() else to
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RecipeError(f"{target} exists already; name another file: danlu recipes copy {name} FILE") from None
    except OSError as error:
        raise ResourceError(f"{target} cannot be written: {error.strerror}") from None
    return target
