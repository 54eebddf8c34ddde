"""Limits on what a chat template may do with one conversation: a template is a program that came from the internet.

Everything countable is counted, so that the same row fails on every machine: passes through loops and macros, and
characters written. Memory is limited by the address space of the process while a template renders, and processor time
by a timer; where a timer cannot interrupt, inside one operation of C, a tokenising process is ended by the kernel.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

STEPS = 2_000_000
"""The most passes through loops and macros for one conversation, in addition to the square of its messages."""
CHARACTERS = 8 * 2**20
"""The most characters written for one conversation, in addition to sixteen times its own."""
MEMORY_BYTES = 2 * 2**30
"""The growth of the process's memory that is allowed while one conversation is rendered."""
SECONDS = 30.0
"""The seconds of processor time for one conversation."""
SECONDS_IN_C = 60.0
"""The seconds after which a tokenising process is ended where the first limit does nothing."""

_EVERY = 100  # renderings, or a second: how often the size of the process is read, which takes as long as a short one


class OutOfBounds(Exception):
    """A template exceeds a limit that is counted: passes through loops, or characters."""


class TookTooLong(BaseException):
    """The processor time is used up.

    It is not an Exception, so that handlers on the way do not catch it and go on.
    """


class _Process:
    """The state of this process: one for all templates that it renders."""

    ends_itself = False  # see `end_when_stuck`
    has_timers: bool | None = None
    bytes = 0
    read_at = 0.0
    renderings = 0


def end_when_stuck() -> None:
    """This process may be ended by SIGPROF where a template cannot be interrupted; for processes that only tokenise."""
    _Process.ends_itself = True


@contextmanager
def limited() -> Iterator[None]:
    """Limits memory and processor time of the code inside; without effect where the system has no such limits.

    Raises:
        MemoryError: more memory was asked for.
        TookTooLong: the processor time is used up.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    old_limits = _limit_memory()
    timed = in_main_thread and _start_timers()
    try:
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if _Process.ends_itself:
                signal.setitimer(signal.ITIMER_PROF, 0)
        if old_limits is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, old_limits)


def describe_limit(error: BaseException) -> str:
    """Names the limit that a template has exceeded."""
    match error:
        case MemoryError():
            return f"it needs more than {MEMORY_BYTES / 2**30:g} GiB of memory"
        case RecursionError():
            return "it calls itself without end"
        case TookTooLong():
            return f"it works for more than {SECONDS:g} s"
    return str(error)


def characters(value: Any) -> int:
    """Characters of all texts in a conversation, however deep they lie."""
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
    return count


def _start_timers() -> bool:
    if _Process.has_timers is None:  # asked once: it takes as long as rendering a short conversation
        free = hasattr(signal, "setitimer") and signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL
        if free:
            signal.signal(signal.SIGVTALRM, _interrupt)
        _Process.has_timers = free
    if not _Process.has_timers:
        return False
    # Again every second: what is raised may be lost, in a destructor for example.
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1.0)
    if _Process.ends_itself:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_IN_C)
    return True


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TookTooLong


def _limit_memory() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:
        return None
    _Process.renderings += 1
    time_s = time.monotonic()
    if _Process.renderings >= _EVERY or time_s > _Process.read_at + 1:
        _Process.bytes, _Process.read_at, _Process.renderings = 0, time_s, 0
        with suppress(OSError, ValueError):
            _Process.bytes = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    if not _Process.bytes:
        return None
    old_limits = resource.getrlimit(resource.RLIMIT_AS)
    limit = _Process.bytes + MEMORY_BYTES
    if old_limits[0] != resource.RLIM_INFINITY and old_limits[0] <= limit:
        return None
    resource.setrlimit(resource.RLIMIT_AS, (limit, old_limits[1]))
    return old_limits
