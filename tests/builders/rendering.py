"""One row as samples, its error raised."""

from __future__ import annotations

from danlu.core.errors import DataError
from danlu.data.render import RenderedSample, RenderSettings, render_rows
from danlu.data.rows import Row
from danlu.data.tokenizer import Tokenizer


def render(row: Row, where: str, tokenizer: Tokenizer, rendering: RenderSettings) -> list[RenderedSample]:
    """What `render_rows` gives of one row.

    Raises:
        DataError: the row cannot be rendered; the message begins with `where`.
    """
    outcome = render_rows([row], [where], tokenizer, rendering)[0]
    if isinstance(outcome, DataError):
        raise outcome
    return outcome
