"""HTML pages from the Jinja templates beside this file: one frame, no script, no font, no image from outside.

The template engine escapes every value, and the frame's Content-Security-Policy forbids scripts and requests besides.
A page begins with a comment that names its kind, so that danlu writes over earlier pages of that kind and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.atomic_write import write_atomically
from danlu.errors import RecipeError, ResourceError

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class HtmlPage:
    """A kind of page, "preview", "verification" or "report", whose template is `templates/KIND.html.j2`."""

    kind: str
    flag: str = "--html"
    """The option that names its file, for messages."""

    @property
    def start(self) -> str:
        """The two lines that every page of this kind begins with."""
        return f"<!doctype html>\n<!-- danlu {self.kind} -->\n"

    def render(self, **values: Any) -> str:
        """The whole page. `values` are what the template names, among them `title` and `heading` of the frame."""
        # Here, not at the top: only --html needs the 60 ms that loading Jinja takes.
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            keep_trailing_newline=True,
            lstrip_blocks=True,
            trim_blocks=True,
            undefined=StrictUndefined,
        )
        return self.start + environment.get_template(f"{self.kind}.html.j2").render(values)

    def write(self, file: Path, text: str) -> None:
        """Writes a page. Raises ResourceError if it cannot be written."""
        try:
            write_atomically(file, text.encode())
        except OSError as error:
            raise ResourceError(f"{self.flag} {file}: cannot be written: {error.strerror}") from None

    def check_target(self, file: Path) -> None:
        """Refuses to write over anything but an earlier page of this kind.

        Raises RecipeError where the file is something else or its folder is missing, ResourceError if it cannot be
        read.
        """
        if not file.parent.is_dir():
            raise RecipeError(f"{self.flag} {file}: there is no folder {file.parent}")
        if file.is_dir():
            raise RecipeError(f"{self.flag} {file}: this is a folder; name a file in it")
        try:
            is_other = file.exists() and not file.read_bytes().startswith(self.start.encode())
        except OSError as error:
            raise ResourceError(f"{self.flag} {file}: cannot be read: {error.strerror}") from None
        if is_other:
            raise RecipeError(
                f"{self.flag} {file}: exists and is no danlu {self.kind}, so it stays as it is. Choose another name"
            )
