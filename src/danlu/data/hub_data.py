"""Data sets of the Hugging Face hub, and folders that `datasets` has written with several splits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import DataError
from danlu.core.small_files import parse_json, read_small_text
from danlu.data.file_formats import DATASET_DICT, first_line

if TYPE_CHECKING:
    from danlu.recipe.sections import Source

_OTHER_SUBSETS = re.compile(
    r"(?:among the available configs: \[|not found\. Available: \[|configs in the cache: \[|"
    r"configurations in the cache: )(?P<names>[^\]\n]*)"
)
_UNKNOWN_SPLIT = re.compile(r"Unknown split .*Should be one of \[(?P<names>.*)\]", re.DOTALL)

_NAME = re.compile(r"[^\s\[\]',\"]+")


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


def hub_rows(source: Source, path: str, no_file: str | None) -> Any:
    """Returns a `datasets.Dataset` of the hub, from the local cache when there is no network; or of a folder that has
    the layout of a hub data set.

    no_file: the reason why the path is no file, for messages; None for a folder.

    Raises:
        DataError: it cannot be loaded; the message names each attempt, and the splits or the subsets that there are
            where it has others, or several.
    """
    # Imported here: most of a second, and only hub data sets need it.
    import datasets

    from danlu.core.hub_access import hub_within_bound

    unreachable = None
    try:
        with hub_within_bound() as unreachable:
            return datasets.load_dataset(path, name=source.subset, split=source.split)
    except Exception as error:  # the hub client raises a dozen kinds, with none in common
        if (match := _UNKNOWN_SPLIT.search(str(error))) is not None:
            raise _no_split(path, source.split, _NAME.findall(match["names"]), source.subset) from error
        if (match := _OTHER_SUBSETS.search(str(error))) is not None:
            raise _no_subset(path, source.subset, _NAME.findall(match["names"])) from error
        reason = unreachable or f"{type(error).__name__}: {first_line(error)}"
        asked = "" if source.subset is None else f"subset '{source.subset}', "
        if no_file is None:
            raise DataError(f"{path}: cannot be loaded ({asked}split '{source.split}'): {reason}") from error
        raise DataError(
            f"{path}: {no_file}, and the hub data set '{path}' ({asked}split '{source.split}') cannot "
            f"be loaded: {reason}. Without network, only sets that were loaded before are there"
        ) from error


def _no_subset(path: str, subset: str | None, names: Sequence[str]) -> DataError:
    problem = "it has several subsets" if subset is None else f"there is no subset '{subset}'; it has"
    return DataError(
        f"{path}: {problem}{':' if subset is None else ''} {', '.join(names)}. Say which in the recipe: "
        f"{{path: {path}, subset: {names[0] if names else '...'}}}"
    )


def _no_split(path: str, split: str, names: Sequence[str], subset: str | None = None) -> DataError:
    listed, of_subset = ", ".join(names), "" if subset is None else f"subset: {subset}, "
    return DataError(
        f"{path}: there is no split '{split}'; it has {listed}. Say which in the recipe: "
        f"{{path: {path}, {of_subset}split: {names[0] if names else '...'}}}"
    )
