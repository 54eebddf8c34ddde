"""The names of token stores in the cache, and whether it can have those of a recipe's rows. Imports no numpy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a quarter of a second at the start of every tokenising process
    from danlu.recipe.sections import Data, Source

MARKER = "COMPLETE"
"""The file of a store that is whole."""


def store_name(source: Source) -> str:
    """The name of the store of a source's rows: that of its file without the ending."""
    return Path(source.path.partition("#")[0]).stem


def leading(name: str) -> str:
    """The beginning of the name of a store's folder; a key of all that its tokens depend on follows."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40]


def has_stores(folder: Path, name: str) -> bool:
    """Whether a cache has a store of that name, with any key."""
    return any(folder.glob(f"{leading(name)}-*/{MARKER}"))


def may_be_cached(data: Data) -> bool:
    """Whether the cache has a store with the name of each source of `data.train`, which may be one of other tokens.

    Where it has not, there is nothing that numpy and the code of rows would be imported for.
    """
    folder = Path(data.cache).expanduser()
    return not data.streaming and all(has_stores(folder, store_name(source)) for source in data.train)
