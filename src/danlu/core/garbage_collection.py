"""Python's cyclic garbage collector, off while a command starts and when it ends."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the collector of cycles in the block, and leaves it as it was.

    For blocks that make what stays, as imports, the types of a recipe and one plan do: the collector looks through all
    of it again and again, a tenth of the time, and finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def skip_collection_at_exit() -> None:
    """Makes the interpreter end without a search for cycles, which the operating system frees with all other memory.

    The interpreter looks through every object several times before it ends: 0.1 s of a command that takes one.
    """
    atexit.register(gc.freeze)
