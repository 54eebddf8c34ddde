"""Whether a folder may be written into, and folders that appear whole or not at all.

The one check of the present content of an output folder: runs, studies, the demo and results all ask here.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from danlu.core.atomic_write import UNFINISHED, sync_file
from danlu.core.errors import ModelError, ResourceError


def refuse_foreign_files(folder: Path, is_own: Callable[[str], bool], *, holds: str, advice: str) -> None:
    """Raises ResourceError if an existing folder has entries for which `is_own` is false.

    Unfinished files of `write_atomically` from a killed process count as own. holds, advice: the message before and
    behind their names.
    """
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not is_own(name) and not UNFINISHED.fullmatch(name)]
    if foreign:
        raise ResourceError(f"{folder}: {holds} ({shortened(foreign, 5)}). {advice}")


def refuse_existing(target: Path) -> None:
    """Raises ResourceError unless `target` is absent or an empty folder; a broken link is something, too."""
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ResourceError(f"{target}: is there already. Choose an empty or new folder")


def shortened(names: Sequence[str], shown: int) -> str:
    """`a, b and 7 more`, of at least one name."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _amount(count: int) -> str:
    """Bytes for a message; few of them exactly, which would be 0.00 GB."""
    return f"{count / 1e9:.2f} GB" if count >= 10**7 else f"{count:,} bytes"


@contextmanager
def replace_folder(folder: Path, needed_bytes: int, *, own_file: str) -> Iterator[Path]:
    """Yields a temporary sibling that takes `folder`'s place when the block ends well, and is deleted when it does not.

    own_file: a file that only a model or adapter folder has; a folder without it that is not empty is not replaced.
    Raises ModelError for such a folder, ResourceError where the disk has less than `needed_bytes` or cannot be written.
    """
    fresh, old = (folder.with_name(f".{folder.name}.{state}") for state in ("writing", "replaced"))
    try:
        if folder.exists() and not folder.is_dir():
            raise ModelError(f"{folder}: a model folder cannot be written here, this is a file")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / own_file).is_file():
            raise ModelError(f"{folder}: not written: the folder holds something other than a model. Choose another")
        folder.parent.mkdir(parents=True, exist_ok=True)
        _tidy(folder, fresh, old)  # after a process that was killed
        free = shutil.disk_usage(folder.parent).free
        if free < needed_bytes:
            raise ResourceError(
                f"{folder}: the disk has {_amount(free)} free, the model takes {_amount(needed_bytes)}: "
                f"{_amount(needed_bytes - free)} are missing. Nothing was written"
            )
        fresh.mkdir()
        yield fresh
        # To the disk before the rename: else a power cut could leave the name without the content.
        for file in fresh.rglob("*"):
            if file.is_file():
                sync_file(file)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error
        raise ResourceError(f"{folder}: the model cannot be written: {reason}") from error
    finally:
        _tidy(folder, fresh, old)


def _tidy(folder: Path, fresh: Path, old: Path) -> None:
    """Removes the siblings that a save leaves; a model that was moved away and never replaced comes back."""
    # os.path.exists says False where Path.exists raises, as in a folder that may not be entered.
    if os.path.exists(old) and not os.path.exists(folder):
        old.rename(folder)
    for left_over in (fresh, old):
        if os.path.exists(left_over):
            shutil.rmtree(left_over)
