"""The HTML pages that danlu writes: one frame, no script, no font, no image from outside.

They know each other by their first lines, and nothing else is ever written over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from danlu.errors import RecipeError, ResourceError

# What the text of a row could smuggle past the escaping, the browser still would not load or run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class HtmlPage:
    """A kind of page: "preview", "verification"."""

    kind: str

    @property
    def start(self) -> str:
        """What a page of this kind begins with."""
        return f"<!doctype html>\n<!-- danlu {self.kind} -->\n"

    def written(self, title: str, heading: str, body: Iterable[str], style: str) -> str:
        """A whole page; `title` and `heading` are text, `body` is lines of HTML."""
        return self.start + "\n".join(
            [
                '<html lang="en">',
                "<head>",
                '<meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                f"<title>{escape(title)}</title>",
                f"<style>{STYLE}{style}</style>",
                "</head>",
                "<body>",
                "<main>",
                f"<h1>{escape(heading)}</h1>",
                *body,
                "</main>",
                "</body>",
                "</html>",
                "",
            ]
        )

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


STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fff; --ink: #1f2328; --quiet: #57606a; --line: #d0d7de;
  --wrong: #cf222e; --one: #15803d; --other: #0e7490;
}
@media (prefers-color-scheme: dark) { :root {
  --ground: #0d1117; --ink: #e6edf3; --quiet: #9198a1; --line: #3d444d;
  --wrong: #f85149; --one: #4ade80; --other: #22d3ee;
} }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 72rem; margin: auto; padding: 1rem }
table { border-collapse: collapse }
th { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0; font-weight: 600 }
td { vertical-align: top; padding: .15rem 1rem .15rem 0 }
"""
