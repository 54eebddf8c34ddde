"""Signals that ask a run to save and stop, and the request that they make between two steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from danlu.core.errors import Stopped
from danlu.core.terminal import write_to_stderr

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C; `kill` and schedulers; a terminal that is closed; the warning before a time limit (SLURM's
`--signal=USR1@120`, submitit's SIGUSR2)."""

INSISTENT_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Those of which a second one stops a run at once. A closing terminal sends SIGHUP from the system and from the shell,
and a warning may be repeated: neither asks for more than the first did, and SIGTERM after a warning lets the run go on
saving."""
TOGETHER_S = 1.0
"""`together_s` of a StopRequest in processes that a launcher has started."""


def heeded_signals() -> list[signal.Signals]:
    """The signals that a run handles: all but those that whoever started this process has it ignore (`nohup`).

    SIGINT is handled in any case: a shell without job control has the commands that end in `&` ignore it.
    """
    return [n for n in STOP_SIGNALS if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]


class StopRequest:
    """Asks the loop to stop after its present step on each of `STOP_SIGNALS`, while entered; a second signal stops at
    once.

    The loop reads `requested` between steps, saves, leaves, and exits with `exit_code`. A second signal of
    `INSISTENT_SIGNALS` (of either kind) raises Stopped wherever the program is; the others only ever ask. Handlers that
    were there before return on exit. Python runs handlers in the main thread only: entered in another one, as of a
    program that trains in its background, no signal is handled here, and all stay that program's.

    Args:
        announce    is called with one line of text when the first signal comes, inside the signal handler
        together_s  signals that come so soon after the first are the same request: a scheduler signals the launcher
                    and all of its processes, and the launcher hands its own on to them

    Attributes:
        signal   the last one received; None before the first
        at_once  the first signal raises Stopped too: there is nothing to be saved yet, or any more
    """

    def __init__(self, announce: Callable[[str], None] = write_to_stderr, *, together_s: float = 0.0) -> None:
        self._announce = announce
        self._together_s = together_s
        self._insisted_at: float | None = None  # when the first came of those that can insist
        self._previous: dict[signal.Signals, Any] = {}
        self.signal: signal.Signals | None = None
        self.at_once = False

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the number of the last signal (130 for Ctrl-C); 0 when there was none."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in heeded_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python, and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, can_insist = not self.requested, number in INSISTENT_SIGNALS
        self.signal = signal.Signals(number)
        again = can_insist and self._insisted_at is not None
        if self.at_once or (again and time.monotonic() >= (self._insisted_at or 0.0) + self._together_s):
            raise Stopped(number)
        if can_insist and not again:
            self._insisted_at = time.monotonic()
        if not is_first:
            return
        if can_insist:
            key = "press Ctrl-C" if number == signal.SIGINT else f"send {self.signal.name}"
            self._announce(f"stopping after this step; {key} again to stop at once")
        else:
            self._announce(f"{self.signal.name}: stopping after this step; press Ctrl-C twice to stop at once")
