"""The HTML pages that danlu writes know each other by their first lines, and nothing else is ever written over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from danlu.errors import RecipeError, ResourceError


@dataclass(frozen=True)
class OwnPage:
    """A kind of page: "preview", "verification"."""

    kind: str

    @property
    def start(self) -> str:
        """What a page of this kind begins with."""
        return f"<!doctype html>\n<!-- danlu {self.kind} -->\n"

    def check_target(self, file: Path) -> None:
        """Refuses to write over anything but an earlier page of this kind.

        Raises RecipeError where the file is something else or its folder is missing, ResourceError if it cannot be
        read.
        """
        if not file.parent.is_dir():
            raise RecipeError(f"--html {file}: there is no folder {file.parent}")
        if file.is_dir():
            raise RecipeError(f"--html {file}: this is a folder; name a file in it")
        try:
            is_other = file.exists() and not file.read_bytes().startswith(self.start.encode())
        except OSError as error:
            raise ResourceError(f"--html {file}: cannot be read: {error.strerror}") from None
        if is_other:
            raise RecipeError(
                f"--html {file}: exists and is no danlu {self.kind}, so it stays as it is. Choose another name"
            )
