"""Processes that do work for this one: plain `python -c` children that are spoken to over pipes.

Unlike multiprocessing's spawn they do not run the caller's main module again, so a script without an `if __name__`
guard works, and unlike its fork they take over neither torch nor its threads. They end by themselves when the caller is
killed, because their input ends, which they watch while they work too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from danlu.core.stop_signals import STOP_SIGNALS
from danlu.core.terminal import drop_failed_writes


def import_paths(modules: Sequence[str]) -> list[str]:
    """Returns the import paths of a process that needs these modules: the folders of sys.path, without the working
    directory.

    `python -m danlu` and `python -c` put the working directory in front, and PYTHONPATH comes before the standard
    library, so a file of the user's would take the place of a module. It stays where one of the modules lies in it.
    """
    working_directory = Path.cwd()
    needed = working_directory in [Path(str(sys.modules[name].__file__)).parents[name.count(".")] for name in modules]
    return [path for path in sys.path if path and (needed or Path(path) != working_directory)]


def python_command(statement: str) -> list[str]:
    """The command of a process that runs a statement.

    With -P: a file of the working directory that is named like a module (tokenize.py) must not take its place.
    """
    return [sys.executable, "-P", "-c", statement]


def take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns a worker process's requests and replies, both for this process alone.

    The output of libraries goes to stderr, and does not land among the replies; their input is empty. A stderr that
    takes nothing any more fails no work. Signals that ask to stop do nothing: a closed terminal and a scheduler send
    theirs to workers too, and the caller decides: it ends this process when its own work is saved.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    drop_failed_writes("stdout", "stderr")
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Takes the place of a signal's handler. A program that this process starts has the system's own again."""


def end_with_the_caller(requests: BinaryIO, end: Callable[[], None] = lambda: os._exit(0)) -> None:
    """Ends a worker process when the other end of its input closes, whatever it is busy with in Python."""
    if hasattr(select, "poll"):
        threading.Thread(target=_wait_for_hangup, args=(requests.fileno(), end), daemon=True).start()


def _wait_for_hangup(descriptor: int, end: Callable[[], None]) -> None:
    watch = select.poll()
    watch.register(descriptor, 0)  # no events but the one that cannot be left out: hung up
    watch.poll()
    end()
