"""The recipes and chat templates that come with danlu, in `recipes/`, which a wheel carries inside danlu.recipe."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from danlu.core.errors import DanluError


def shipped_folder() -> Path:
    """Returns the folder with the recipes: in danlu.recipe of an installed wheel, at the top of a checkout.

    Raises DanluError if there is neither.
    """
    package = Path(__file__).resolve().parents[1]
    packaged, checkout = package / "recipe" / "shipped", package.parents[1] / "recipes"
    for candidate in (packaged, checkout):
        if candidate.is_dir():
            return candidate
    raise DanluError(f"this installation of danlu has no recipes: neither {packaged} nor {checkout} is there")


@cache
def templates() -> dict[str, str]:
    """Names of the chat templates and the comment at the start of each."""
    files = {path.stem: path for path in sorted((shipped_folder() / "templates").glob("*.jinja"))}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return {name: text.removeprefix("{#-").partition("-#}")[0].strip() for name, text in texts.items()}


def template_path(path: str) -> Path:
    """The file of a chat template: that of a name that comes with danlu, else the path as it is."""
    return shipped_folder() / "templates" / f"{path}.jinja" if path in templates() else Path(path).expanduser()
