"""The entry of a file in LLaMA-Factory's dataset_info.json, which lies in the file's own folder.

Its form is that of the README in LLaMA-Factory's data folder. Read of an entry are `formatting`, `columns`, `tags` and
`ranking`; columns that an entry with `columns` does not name are not read, as there. The file of the same name that
`datasets` writes into its folders has no such entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError
from danlu.core.small_files import parse_json, read_small_text
from danlu.data.column_mapping import ColumnMapping
from danlu.recipe.sections.data import TAG_NAMES

DATASET_INFO = "dataset_info.json"
_OWN_NAMES = "Correct it; or say data.columns in the recipe, or data.columns: {} for the file's own names"
_NAMES = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "conversations"},
}
"""The names of row formats for its names of columns, by formatting."""
_NAMES_OF_ALL = {"system": "system", "tools": "tools", "kto_tag": "kto_tag"}
_PAIR = {"chosen": "chosen", "rejected": "rejected"}
_NOT_READ = {*(name for names in _NAMES.values() for name in names), *_PAIR, "images", "videos", "audios"}
"""Its names of columns that some formatting does not read."""


def neighboring_mapping(path: Path) -> ColumnMapping | None:
    """The columns that a dataset_info.json next to a file names for it; None where it has no entry with any.

    Raises:
        DataError: the file is broken, or its entry cannot be followed.
    """
    info = path.parent / DATASET_INFO
    if path.name == DATASET_INFO or not info.is_file():
        return None
    try:
        entries = parse_json(read_small_text(info))
    except json.JSONDecodeError as error:
        raise DataError(f"{info}:{error.lineno}:{error.colno}: broken JSON: {error.msg}. {_OWN_NAMES}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{info}: cannot be read: {error}. {_OWN_NAMES}") from error
    if not isinstance(entries, dict):
        raise DataError(f"{info}: expected an object with an entry for each data set. {_OWN_NAMES}")
    named = {
        name: entry
        for name, entry in entries.items()
        if isinstance(entry, dict) and isinstance(entry.get("file_name"), str)
        if Path(entry["file_name"].rstrip("/")) == Path(path.name)
    }
    mappings = {name: _mapping(entry, f"{info}: {name}") for name, entry in named.items()}
    distinct = {json.dumps(None if mapping is None else mapping.key()): name for name, mapping in mappings.items()}
    if len(distinct) > 1:
        raise DataError(
            f"{info}: {' and '.join(distinct.values())} name other columns of {path.name}. Say which in data.columns"
        )
    return next(iter(mappings.values()), None)


def _mapping(entry: Mapping[str, Any], where: str) -> ColumnMapping | None:
    """The mapping of an entry; None where it has the columns and tags by default, which danlu reads by itself."""
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _NAMES:
        raise DataError(f"{where}: formatting {formatting!r} is none of {', '.join(_NAMES)}. {_OWN_NAMES}")
    columns, tags = (_texts(entry.get(name), f"{where}: {name}") for name in ("columns", "tags"))
    tags = {} if tags is None or formatting == "alpaca" else tags
    if columns is None:
        if not tags:
            return None
        columns = {"messages": "conversations"}
    names = _NAMES[formatting] | _NAMES_OF_ALL
    if entry.get("ranking"):
        names |= _PAIR
    elif formatting == "alpaca" and "response" not in columns:  # documents
        names["prompt"] = "text"
    unknown = next((name for name in (*columns, *tags) if name not in {*names, *_NOT_READ, *TAG_NAMES}), None)
    if unknown is not None:
        raise DataError(f"{where}: {unknown!r} is the name of no column or tag there. {_OWN_NAMES}")
    read = {names[name]: column for name, column in columns.items() if name in names}
    if not read:
        raise DataError(f"{where}: columns: none of them is read with formatting {formatting}. {_OWN_NAMES}")
    return ColumnMapping.of({**read, **tags}, where, others=False)


def _texts(value: Any, where: str) -> dict[str, str] | None:
    """An object of texts, without the names that are null; None for one that is not there. Raises DataError."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(text is None or isinstance(text, str) for text in value.values()):
        raise DataError(f"{where}: expected an object of texts. {_OWN_NAMES}")
    return {name: text for name, text in value.items() if text is not None}
