"""Data sets of the Hugging Face hub, and folders that `datasets` has written with several splits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError
from danlu.core.small_files import parse_json, read_small_text
from danlu.data.file_formats import first_line

DATASET_DICT = "dataset_dict.json"
_UNKNOWN_SPLIT = re.compile(r"Unknown split .*Should be one of \[(?P<names>.*)\]", re.DOTALL)


def split_folder(folder: Path, split: str) -> Path:
    """The folder of one split, of a folder that `DatasetDict.save_to_disk` wrote; any other path as it is.

    Raises:
        DataError: it has no such split; the message names those that it has.
    """
    listed = folder / DATASET_DICT
    try:
        names = parse_json(read_small_text(listed))["splits"] if listed.is_file() else None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError) as error:
        raise DataError(f"{listed}: the names of its splits cannot be read: {error}") from error
    if names is None:
        return folder
    if split not in names:
        raise _no_split(str(folder), split, names)
    return folder / split


def hub_rows(path: str, split: str, no_file: str) -> Any:
    """Returns a `datasets.Dataset` of the hub, from the local cache when there is no network.

    no_file: the reason why the path is no file, for messages.

    Raises:
        DataError: it cannot be loaded; the message names each attempt, and the splits where it has another.
    """
    # Imported here: most of a second, and only hub data sets need it.
    import datasets

    from danlu.core.hub_access import hub_within_bound

    unreachable = None
    try:
        with hub_within_bound() as unreachable:
            return datasets.load_dataset(path, split=split)
    except Exception as error:  # the hub client raises a dozen kinds, with none in common
        if (match := _UNKNOWN_SPLIT.search(str(error))) is not None:
            raise _no_split(path, split, re.findall(r"[\w.-]+", match["names"])) from error
        reason = unreachable or f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"{path}: {no_file}, and the hub data set '{path}' (split '{split}') cannot "
            f"be loaded: {reason}. Without network, only sets that were loaded before are there"
        ) from error


def _no_split(path: str, split: str, names: Sequence[str]) -> DataError:
    listed = ", ".join(names)
    return DataError(
        f"{path}: there is no split '{split}'; it has {listed}. Say which in the recipe: "
        f"{{path: {path}, split: {names[0] if names else '...'}}}"
    )
