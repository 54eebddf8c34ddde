"""A worker process as its caller sees it: requests, replies, and the meaning of silence.

Requests are pickles, replies are lines of JSON. The pipes never block: whatever the process does, the caller goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.worker_process import import_paths, python_command

LOAD_TIMEOUT_S = 120.0
"""The seconds for a process to start and run the files of its functions; imports are slow the first time."""
_READ_BYTES = 1 << 16
_LONGEST_WAIT_S = 0.5  # a process that left a child behind may end without its pipe being closed: it is looked after


class WorkerConnection:
    """A process, its present task, and the task's deadline.

    Args:
        statement: the statement that the process runs (`python -c`). initial: the first object sent to it. timeout_s:
            the limit of each call.
    """

    def __init__(self, statement: str, initial: Any, timeout_s: float) -> None:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # the processes are the parallelism
        environment["PYTHONPATH"] = os.pathsep.join(import_paths([__name__]))
        self._process = subprocess.Popen(
            python_command(statement),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the caller, and what a reward starts can be ended with it
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._requests, self._replies = self._process.stdin, self._process.stdout
        for pipe in (self._requests, self._replies):
            os.set_blocking(pipe.fileno(), False)
        self._timeout_s = timeout_s
        self._outgoing = memoryview(pickle.dumps(initial, pickle.HIGHEST_PROTOCOL))
        self._incoming = bytearray()
        self._limit_s = max(timeout_s, LOAD_TIMEOUT_S)
        self.deadline = time.monotonic() + self._limit_s
        """The deadline of the present task or of loading, by the clock `time.monotonic`."""
        self.task: Any = None
        """The caller's object for the present task; None: the process is free."""
        self.is_ready = False
        """Whether the process has loaded the first object."""
        self._is_silent = False
        self._processor_until: float | None = None
        self._last_deadline = math.inf

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_late(self) -> bool:
        now = time.monotonic()
        if now > self.deadline and self._processor_until is not None and now < self._last_deadline:
            used = self._processor_time_s()
            if used is not None and used < self._processor_until:  # it has waited for a processor
                self.deadline = min(now + self._processor_until - used, self._last_deadline)
        return now > self.deadline

    @property
    def ending(self) -> str | None:
        """Why no reply will come any more; None where it still may."""
        if self._is_silent:  # it is about to end, or has closed what is not its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        code = self._process.poll()
        if code is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"its process {how}"
        if self._is_silent:
            return "its process does not speak any more"
        return f"no answer within {self._limit_s:g} s" if self.is_late else None

    def take_up_loading(self, loading: str) -> Any:
        """Returns the process's reply when it has loaded the first object; it is ready then. None while it loads.

        loading: a description for messages, behind the recipe's key: "rewards: loading my_rewards.py".
        Raises RecipeError with the problems that it found, ResourceError where it ends or takes too long.
        """
        reply, ending = self.receive(), self.ending
        if reply is not None and reply["problems"]:
            raise RecipeError(reply["problems"])
        if reply is not None:
            self.is_ready = True
        elif ending is not None:
            raise ResourceError(f"{loading}: {ending}")
        return reply

    def wait_until_loaded(self, loading: str) -> Any:
        """Blocks until the worker has loaded; returns or raises the same as `take_up_loading`."""
        while (reply := self.take_up_loading(loading)) is None:
            wait_for_any([self])
        return reply

    def register(self, selector: selectors.BaseSelector) -> None:
        """Has a selector wake up for this process."""
        selector.register(self._replies, selectors.EVENT_READ)
        if self._outgoing:
            selector.register(self._requests, selectors.EVENT_WRITE)

    def call(self, task: Any, call: Any, processor_limit_s: float | None = None) -> None:
        """Sends a request to the process, and starts its time.

        processor_limit_s: the limit of its processor time, where this can be seen, else of the clock, so that a busy
        machine makes nobody late. By the clock it has ten times as much at most.
        """
        assert self.is_ready and not self.task and not self._outgoing, "the process is busy"
        self.task, self._limit_s, self._processor_until = task, self._timeout_s, None
        now = time.monotonic()
        if processor_limit_s is not None:
            used = self._processor_time_s()
            self._limit_s = min(processor_limit_s, self._timeout_s)
            self._processor_until = None if used is None else used + self._limit_s
            self._last_deadline = now + min(10 * self._limit_s, self._timeout_s)
        self.deadline = now + self._limit_s
        self._outgoing = memoryview(pickle.dumps(call, pickle.HIGHEST_PROTOCOL))
        self._flush()

    def post(self, message: Any) -> None:
        """Sends the process a message that needs no reply, behind earlier ones."""
        assert self.is_ready, "it is loading"
        self._limit_s = self.deadline = math.inf
        self._outgoing = memoryview(bytes(self._outgoing) + pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        self._flush()

    def receive(self) -> Any:
        """The next reply if it is there in whole, else None."""
        self._flush()
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._replies.fileno(), _READ_BYTES):
                self._incoming += content
            self._is_silent = True
        line, newline, self._incoming = self._incoming.partition(b"\n")
        if not newline:
            self._incoming = line
            return None
        try:
            return json.loads(line)
        except ValueError:  # a reward has written into what is not its own
            self._is_silent = True
            return None

    def end(self) -> None:
        """Ends the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        self._replies.close()

    def _processor_time_s(self) -> float | None:
        """Returns the processor time that the process has used; None where the system does not report it."""
        try:
            with open(f"/proc/{self._process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None

    def _flush(self) -> None:
        """Writes as much as the pipe takes."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests.fileno(), self._outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # `ending` says why
            self._outgoing = memoryview(b"")


def wait_for_any(workers: Iterable[WorkerConnection | None], longest_s: float = _LONGEST_WAIT_S) -> None:
    """Waits until a busy worker has something to say or is at its deadline, for at most `longest_s` seconds."""
    busy = [worker for worker in workers if worker and (worker.task or not worker.is_ready)]
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            worker.register(selector)
        left_s = min((worker.deadline for worker in busy), default=math.inf) - time.monotonic()
        if busy:
            selector.select(max(0.0, min(longest_s, left_s)))


def end_all(workers: list[WorkerConnection | None]) -> None:
    """Ends all processes, whatever they are doing, and leaves None in their places."""
    for number, worker in enumerate(workers):
        if worker is not None:
            worker.end()
            workers[number] = None
