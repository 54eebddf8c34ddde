"""What danlu logs: pytest's own plugin for it is off, which costs each of the many small tests two milliseconds."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """Yields a text that grows by each warning or error of danlu's loggers, a line each, until the block ends."""
    text, logger = io.StringIO(), logging.getLogger("danlu")
    handler = logging.StreamHandler(text)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
