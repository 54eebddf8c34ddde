"""Worker processes: Python children that do work for this process, and the one protocol that all of them speak.

A worker is a plain `python -c` child. Unlike multiprocessing's spawn it does not run the caller's main module again, so
a script without an `if __name__` guard works, and unlike its fork it takes over neither torch nor its threads. It leads
a group of its own, which ends when the caller ends it or is gone, whatever it is busy with in Python.

Requests are pickles. Replies are bytes behind a header with their length, which nothing that user code prints can be
taken for: the caller unpickles only the replies of workers that run no user code. The caller's pipes never block:
whatever a worker does, the caller goes on when the time is up.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn, TypeVar

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.stop_signals import STOP_SIGNALS
from danlu.core.terminal import drop_failed_writes

Loaded = TypeVar("Loaded")

LOAD_TIMEOUT_S = 120.0
"""The seconds for a worker to start and run the files of its functions; imports are slow the first time."""
LONGEST_WAIT_S = 0.5
"""The seconds between two looks at a worker: one that left a child behind may end without its pipe being closed."""
_READ_BYTES = 1 << 16
_MARK = b"danlu\0re"
_HEADER = struct.Struct(f">{len(_MARK)}sQ")

# -- the caller's side -------------------------------------------------------------------------------------------------


class WorkerProcess:
    """A worker, as its caller sees it.

    Args:
        statement: the statement that it runs.
        first: the first request.
        modules: modules that it imports in addition to this package.
        variables: environment variables that it has in addition to this process's.
        keeps_stderr: its error output is kept for `stderr`; otherwise it goes to that of this process.
        pass_fds: descriptors that it keeps.
    """

    def __init__(
        self,
        statement: str,
        first: Any,
        *,
        modules: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        keeps_stderr: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._stderr = tempfile.TemporaryFile() if keeps_stderr else None  # noqa: SIM115  # closed by `end`
        self._process = subprocess.Popen(
            python_command(statement),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(import_paths([__name__, *modules])), **(variables or {})},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the caller, and what the worker starts can be ended with it
            pass_fds=pass_fds,
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._requests, self._replies = self._process.stdin, self._process.stdout
        for pipe in (self._requests, self._replies):
            os.set_blocking(pipe.fileno(), False)
            weakref.finalize(self, pipe.close)  # another thread may be waiting for a reply when it is ended
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._sending = threading.Lock()
        self._is_silent = False
        self.send(first)

    @property
    def id(self) -> int:
        """The operating system's id of the process."""
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, has closed its pipe, or has written into it other things than replies. Replies
        that it sent before can still be taken."""
        return self._is_silent or self._process.poll() is not None

    def send(self, request: Any, *, waits: bool = False) -> None:
        """Sends a request; does nothing where the worker is gone.

        waits: until the pipe has all of it; otherwise the rest follows with `take`.
        """
        content = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._outgoing += content
        while self._flush() and waits:
            wait_for_any([self])

    def take(self) -> bytes | None:
        """Returns the next reply if it is there in whole, else None."""
        self._flush()
        while not self._is_silent:
            if len(self._incoming) >= _HEADER.size:
                mark, length = _HEADER.unpack_from(self._incoming)
                self._is_silent = mark != _MARK
                end = _HEADER.size + length
                if not self._is_silent and len(self._incoming) >= end:
                    reply = bytes(self._incoming[_HEADER.size : end])
                    del self._incoming[:end]
                    return reply
            try:
                content = os.read(self._replies.fileno(), _READ_BYTES)
            except BlockingIOError:
                return None
            self._incoming += content
            self._is_silent |= not content
        return None

    def receive(self, limit_s: float = math.inf) -> bytes | None:
        """Waits for the next reply; None: there will be none. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while True:
            is_gone = self.is_gone
            if (reply := self.take()) is not None or is_gone:
                return reply
            if time.monotonic() > deadline:
                raise TimeoutError
            wait_for_any([self], deadline - time.monotonic())

    def register(self, selector: selectors.BaseSelector) -> None:
        """Has a selector wake up for this worker."""
        selector.register(self._replies, selectors.EVENT_READ)
        if self._outgoing:
            selector.register(self._requests, selectors.EVENT_WRITE)

    def exit_code(self, wait_s: float | None = 1.0) -> int | None:
        """Returns the exit code of a worker that may be about to end; None where it still runs after `wait_s`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        return self._process.poll()

    def ending(self, wait_s: float = 1.0) -> str:
        """Describes how a worker that is gone ended."""
        code = self.exit_code(wait_s)
        return "does not speak any more" if code is None else describe_exit(code)

    def stderr(self) -> str:
        """Returns its error output, where it is kept."""
        assert self._stderr is not None, "it goes to this process's"
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace").strip()

    def wait_until_loaded(self, loading: str, limit_s: float) -> Any:
        """Blocks until the worker has loaded its first request, and returns or raises the same as `report_of`."""
        try:
            return self.report_of(self.receive(limit_s), loading)
        except TimeoutError:
            raise ResourceError(f"{loading}: no answer within {limit_s:g} s") from None

    def report_of(self, reply: bytes | None, loading: str) -> Any:
        """Returns the report in the first reply of a worker that calls `Caller.load`.

        loading: a description for messages, behind the recipe's key: "rewards: loading my_rewards.py".
        Raises RecipeError with the problems that the worker found, ResourceError where it is gone.
        """
        if (said := decoded(reply)) is None:
            raise ResourceError(f"{loading}: its process {self.ending()}")
        if said["problems"]:
            raise RecipeError(said["problems"])
        return said["report"]

    def end(self) -> None:
        """Ends the process and all that it has started, whatever they are doing."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._stderr is not None:
            self._stderr.close()

    def _flush(self) -> bool:
        """Writes as much as the pipe takes. Returns whether something is left."""
        with self._sending:
            try:
                while self._outgoing:
                    del self._outgoing[: os.write(self._requests.fileno(), self._outgoing)]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._outgoing.clear()
            return bool(self._outgoing)


def wait_for_any(workers: Iterable[WorkerProcess], longest_s: float = LONGEST_WAIT_S) -> None:
    """Waits until a worker has something to say or its pipe takes more, for a moment at most."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            worker.register(selector)
        selector.select(max(0.0, min(longest_s, LONGEST_WAIT_S)))


def end_all(workers: list[Any]) -> None:
    """Ends all workers of a list, and leaves None in their places."""
    for place, worker in enumerate(workers):
        if worker is not None:
            worker.end()
            workers[place] = None


def decoded(reply: bytes | None) -> Any:
    """Decodes a reply of JSON; None where there is none, or where user code has written into what is not its own."""
    try:
        return None if reply is None else json.loads(reply)
    except ValueError:
        return None


def describe_exit(code: int) -> str:
    """Describes how a process ended, by its exit code: "ended with exit code 1"."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def one_thread() -> dict[str, str]:
    """Returns the variables of workers that are the parallelism themselves, unless this process's say otherwise."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


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


# -- the worker's side -------------------------------------------------------------------------------------------------


class Caller:
    """The process that started this one, as the worker sees it. A worker makes it before it does anything else.

    Args:
        is_watched: this process ends with the caller, which a thread looks after.
    """

    def __init__(self, *, is_watched: bool = True) -> None:
        self.requests, self.replies = _take_over_pipes()
        self._sending = threading.Lock()
        if is_watched:
            end_with(self.requests)

    def receive(self) -> Any:
        """Returns the next request; ends this process where there is none any more."""
        try:
            return pickle.load(self.requests)  # noqa: S301  # from the process that started this one
        except (EOFError, pickle.UnpicklingError):
            end_group()

    def load(self, load: Callable[[Any], Loaded], report: Callable[[Loaded], Any] = lambda loaded: None) -> Loaded:
        """Loads the first request and returns the result; replies with the problems of a RecipeError, which ends this
        process, or with a report of the result.
        """
        try:
            loaded = load(self.receive())
        except RecipeError as error:
            self.reply({"problems": error.problems})
            sys.exit()
        self.reply({"problems": [], "report": report(loaded)})
        return loaded

    def reply(self, value: Any) -> None:
        """Sends a reply of JSON."""
        self.send([json.dumps(value).encode()])

    def send(self, parts: Iterable[bytes]) -> None:
        """Sends a reply that is made of these parts; from any thread."""
        parts = list(parts)
        with self._sending, suppress(BrokenPipeError):  # the caller is gone: then the requests end too
            self.replies.writelines([_HEADER.pack(_MARK, sum(map(len, parts))), *parts])
            self.replies.flush()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns a worker's requests and replies, both for the protocol alone.

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


def end_with(file: BinaryIO) -> None:
    """Ends this process and its group when the other end of a pipe closes, whatever it is busy with in Python."""
    if hasattr(select, "poll"):
        threading.Thread(target=_wait_for_hangup, args=(file.fileno(),), daemon=True).start()


def _wait_for_hangup(descriptor: int) -> None:
    watch = select.poll()
    watch.register(descriptor, 0)  # no events but the one that cannot be left out: hung up
    watch.poll()
    end_group()


def end_group() -> NoReturn:
    """Ends this process and all that it has started: it leads a group of its own."""
    with suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)
