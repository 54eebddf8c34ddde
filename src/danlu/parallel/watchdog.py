"""A thread of each process that notices collectives that hang, and the place of the main thread that it reports.

It looks again and again at torch's flight recorder. An inquiry into a hang is a number in torch's store, which answers
while main threads are stuck in C++ and let other threads run. `hang_detection` decides when to act and how.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from danlu.parallel.flight_recorder import ProcessState, decode, main_thread_line, pending_collective
from danlu.parallel.hang_detection import HangDetector, Limits
from danlu.parallel.phase import PHASE, PhaseTracker


class Watchdog:
    """Looks, in a thread of its own, whether a collective of this process hangs, and answers inquiries of others.

    Args:
        store      torch's store, on a connection that no other thread uses
        timeout_s  the time that a collective may take; an inquiry starts a minute before, or after half of it
        say        shows a message to the user; called on rank 0 alone
        end        ends the process with a message, once torch ought to have: it may be stuck in C++
        launcher   process id of the launcher of this process; when that is gone, SIGTERM asks this one to stop
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        log: Callable[[str], None],
        end: Callable[[str], None],
        launcher: int | None = None,
        tracker: PhaseTracker = PHASE,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._limits = Limits(timeout_s)
        self._detector = HangDetector(self._limits, rank)
        self._log, self._end, self._launcher, self._tracker = log, end, launcher, tracker
        self._stop = threading.Event()
        self._settled = threading.Event()  # no inquiry is being answered
        self._settled.set()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._limits.interval_s)

    def report(self) -> str | None:
        """The message about the collective in which this process hangs or has failed; None where it makes progress.

        Waits until an inquiry that is being answered has been, at most as long as a collective may take.
        """
        self._settled.wait(self._limits.timeout_s)
        report = self._detector.report
        return None if report is None else report.message

    def _run(self) -> None:
        has_store = True  # until it is gone with the process that kept it: then nobody is left to ask
        while not self._stop.wait(self._limits.interval_s):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._launcher = None
                os.kill(os.getpid(), signal.SIGTERM)
            if has_store:
                try:
                    self._look()
                except dist.DistError:
                    has_store = False

    def _look(self) -> None:
        detector = self._detector
        self._print(detector.looked(pending_collective(), time.monotonic()))
        asked = self._store.add("hang/asked", 0)
        if asked <= detector.inquiries_answered and detector.starts_inquiry:
            asked = self._store.add("hang/asked", 1)
        # Several processes may have started one at once, and each of them waits for replies to its own.
        if asked > detector.inquiries_answered:
            self._settled.clear()
            try:
                for inquiry in range(detector.inquiries_answered + 1, asked + 1):
                    self._reply(inquiry)
                self._print(detector.replied(asked, self._replies(asked)))
            finally:
                self._settled.set()
        if (message := detector.exit_message()) is not None:
            self._end(message)

    def _print(self, message: str | None) -> None:
        if message is not None and self._rank == 0:
            self._log(message)

    def _reply(self, inquiry: int) -> None:
        state = ProcessState(pending_collective(), str(self._tracker), main_thread_line())
        self._store.set(f"hang/{inquiry}/{self._rank}", state.encode())

    def _replies(self, inquiry: int) -> dict[int, ProcessState | None]:
        keys = {rank: f"hang/{inquiry}/{rank}" for rank in range(self._size)}
        until = time.monotonic() + self._limits.replies_s
        while time.monotonic() < until and not self._store.check(list(keys.values())):
            time.sleep(self._limits.interval_s / 10)
        return {rank: decode(self._store.get(key)) if self._store.check([key]) else None for rank, key in keys.items()}
