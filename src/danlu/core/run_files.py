"""The files of a run folder by name, and its lock, which one process holds at a time."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from danlu.core.errors import ResourceError
from danlu.core.file_lock import AlreadyLocked, FileLock

RECIPE = "recipe.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
SUMMARY = "summary.json"
PLAN = "plan.json"
"""The memory and the seconds of a step that were expected before the first one."""
REPORT = "report.html"
LONGROPE_SEARCH = "longrope_search.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
MODEL_EMA = "model-ema"
ADAPTER = "adapter"
ADAPTER_EMA = "adapter-ema"
WANDB_ID_FILE = "wandb-id.txt"
LOCK_FILE = ".lock"
LOGS = "logs"
"""The folder for the console's log, the output of each process but the first, and the exit report of each."""
CONSOLE = "console.txt"
CHAIN = "chain.json"
"""A file of a chain's folder: the hash of each result that a stage was begun with, by stage, and by earlier stage."""

OWN_FILES = re.compile(  # .tmp: a kill in an earlier danlu's write_atomically; a dot: one in saving the model
    rf"({re.escape(RECIPE)}|{re.escape(ENVIRONMENT)}|{re.escape(SUMMARY)}|{re.escape(PLAN)})(\.tmp)?|{re.escape(METRICS)}|{re.escape(ROLLOUTS)}|{re.escape(LONGROPE_SEARCH)}|{re.escape(REPORT)}|tensorboard"
    rf"|{CHECKPOINTS}|\.?({MODEL_EMA}|{MODEL}|{ADAPTER_EMA}|{ADAPTER})(-value)?(\.writing|\.replaced)?|{re.escape(LOCK_FILE)}(\.\d+)?|wandb|{LOGS}|{re.escape(WANDB_ID_FILE)}"
)
"""All names that a run gives, as a pattern for the whole of one."""


class RunLock:
    """The lock of a run folder, which one process holds at a time; a context manager.

    The system releases it when the process ends, however it does, so there is no stale lock to delete; data workers do
    not inherit it. A disk without locks (`danlu.core.file_lock`) may keep a file of a process of
    another machine, to be deleted by hand.

    Entering (and `acquire`) raises ResourceError, naming the process that holds the folder, or why the folder cannot be
    written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._lock = FileLock(self.path)

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Make the folder if needed, and take its lock. Raises ResourceError, as entering does."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except AlreadyLocked as taken:
            in_use = f"{folder}: another danlu process ({taken.holder}) is using this run folder. "
            if taken.holder.file is not None:
                raise ResourceError(
                    f"{in_use}This disk has no locks (flock), so from here nobody can tell whether it still runs. Wait "
                    f"for it, or choose another `output`; if it is gone, delete {taken.holder.file}"
                ) from None
            raise ResourceError(f"{in_use}Wait for it, stop it, or choose another `output`.") from None
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "Free some space, or choose another `output`." if full else "Choose another `output`."
            raise ResourceError(f"{folder}: the run folder cannot be written: {error.strerror}. {advice}") from error

    def release(self) -> None:
        """Release the lock; another process may take it from now on."""
        self._lock.release()
