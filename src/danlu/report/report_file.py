"""Files that danlu draws: written over earlier ones of their kind, and over nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from danlu.core.atomic_write import write_atomically
from danlu.core.errors import RecipeError, ResourceError


@dataclass(frozen=True)
class ReportFile:
    """A kind of file, which is recognized by its beginning."""

    kind: str
    """The kind's name in messages: danlu report, danlu schedule, ..."""
    start: str
    flag: str
    """The option that names the file, for messages."""

    def write(self, file: Path, text: str) -> None:
        """Writes a file; its text must begin with `start`. Raises ResourceError if it cannot be written."""
        assert text.startswith(self.start), f"a danlu {self.kind} that would not be known again"
        try:
            write_atomically(file, text.encode())
        except OSError as error:
            raise ResourceError(f"{self.flag} {file}: cannot be written: {error.strerror}") from None

    def check_target(self, file: Path) -> None:
        """Refuses to write over anything but an earlier file of this kind.

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
