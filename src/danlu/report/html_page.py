"""HTML pages from the Jinja templates next to this file: one frame, no script, no font, no image from outside.

The template engine escapes every value, and the frame's Content-Security-Policy forbids scripts and requests besides. A
page begins with a comment that names its kind, so that danlu writes over earlier pages of that kind and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.report.report_file import ReportFile

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class HtmlPage:
    """A kind of page, "preview", "verification", "report" or "study", with the template `templates/KIND.html.j2`."""

    kind: str
    flag: str = "--html"
    """The option that names its file, for messages."""

    @property
    def start(self) -> str:
        """The two lines that every page of this kind begins with."""
        return f"<!doctype html>\n<!-- danlu {self.kind} -->\n"

    def render(self, **values: Any) -> str:
        """Renders the whole page. `values` are the names in the template, among them `title` and `heading` of the
        frame."""
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
        self._file.write(file, text)

    def check_target(self, file: Path) -> None:
        """Refuses to write over anything but an earlier page of this kind, as `ReportFile.check_target` does."""
        self._file.check_target(file)

    @property
    def _file(self) -> ReportFile:
        return ReportFile(self.kind, self.start, self.flag)
