"""The process that begins agents: it loads their code once, and forks for each of them.

So an agent begins in milliseconds, whatever it imports, and may crash, hang, or be ended by itself. Requests are the
source of the agents first, then an `AgentCall` to begin one, or a key to end it. Replies are JSON. This process has no
threads, which a fork would not take along.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import selectors
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from danlu.core.worker_process import Caller, describe_exit, end_with
from danlu.rewards.calling import failure_reason
from danlu.rewards.environments.agents import AgentCall, AgentFailed, AgentResult, Solve, play
from danlu.rewards.environments.protocol import EpisodeKey

START = "from danlu.rewards.environments.agent_host import serve; serve()"
_READ_BYTES = 1 << 16
_ENDING_S = 1.0


def serve() -> None:
    """The loop of the process, which ends when its input does."""
    caller = Caller(is_watched=False)
    Host(caller.load(lambda source: source.load()), caller).run()


@dataclass
class _Running:
    key: EpisodeKey
    process: int
    results: int
    """The end of a pipe from which results are read."""
    written: bytes = b""


class Host:
    """The agents that run. solve: an agent."""

    def __init__(self, solve: Solve, caller: Caller) -> None:
        self._solve, self._caller = solve, caller
        self._running: dict[EpisodeKey, _Running] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(caller.requests, selectors.EVENT_READ, None)
        self._incoming = b""
        # Its other end closes with this process, however that ends: then agents end too.
        self._alive_reading, self._alive_writing = os.pipe()

    def run(self) -> None:
        """Runs until the input ends."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._read_result(key.data)
                elif not self._read_requests():
                    for running in list(self._running.values()):
                        self._end(running)
                    return

    def _read_requests(self) -> bool:
        """Whether there is more to come."""
        content = os.read(self._caller.requests.fileno(), _READ_BYTES)
        self._incoming += content
        stream = io.BytesIO(self._incoming)
        while True:
            place = stream.tell()
            try:
                request: Any = pickle.load(stream)  # noqa: S301
            except (EOFError, pickle.UnpicklingError):  # not there as a whole
                break
            if isinstance(request, AgentCall):
                self._begin(request)
            elif (running := self._running.get(request)) is not None:
                self._end(running)
        self._incoming = self._incoming[place:]
        return bool(content)

    def _begin(self, call: AgentCall) -> None:
        reading, writing = os.pipe()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            self._play(call, writing)
        os.close(writing)
        with contextlib.suppress(OSError):  # the agent does the same: who comes first
            os.setpgid(process, process)
        running = self._running[call.key] = _Running(call.key, process, reading)
        self._selector.register(reading, selectors.EVENT_READ, running)

    def _read_result(self, running: _Running) -> None:
        content = os.read(running.results, _READ_BYTES)
        running.written += content
        if content and not running.written.endswith(b"\n"):
            return
        status = self._end(running, _ENDING_S)  # its pipe closes a moment before it has ended
        if running.written.endswith(b"\n"):
            result = json.loads(running.written)
        else:
            ending = describe_exit(os.waitstatus_to_exitcode(status))
            result = asdict(AgentResult(failure=f"its process {ending}"))
        self._caller.reply({"key": running.key, **result})

    def _end(self, running: _Running, wait_s: float = 0.0) -> int:
        """Ends an agent and all that it has started. Returns how it ended, as `waitpid` does.

        wait_s: how long one without a result may take to end by itself.
        """
        self._selector.unregister(running.results)
        os.close(running.results)
        del self._running[running.key]
        ended, status = 0, 0
        deadline = time.monotonic() + wait_s
        while not running.written and ended == 0:
            ended, status = os.waitpid(running.process, os.WNOHANG)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.process, signal.SIGKILL)
        return status if ended else os.waitpid(running.process, 0)[1]

    # -- in the process of an agent ------------------------------------------------------------------------------------

    def _play(self, call: AgentCall, results: int) -> NoReturn:
        """Runs an agent and writes how it ended; never returns."""
        alive = os.fdopen(self._alive_reading, "rb")  # until the end: its descriptor closes with it
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            self._close_others()
            end_with(alive)
            _seed(call)
            with open(results, "wb") as file:
                file.write(json.dumps(asdict(self._result(call))).encode() + b"\n")
        finally:
            sys.stderr.flush()
            os._exit(0)

    def _close_others(self) -> None:
        self._selector.close()
        os.close(self._alive_writing)
        for running in self._running.values():
            os.close(running.results)
        os.close(self._caller.requests.fileno())
        os.close(self._caller.replies.fileno())

    def _result(self, call: AgentCall) -> AgentResult:
        try:
            return play(self._solve, call)
        except AgentFailed as error:
            return AgentResult(failure=str(error))
        except BaseException as error:  # sys.exit too
            return AgentResult(failure=failure_reason(error))


def _seed(call: AgentCall) -> None:
    """Python's random numbers, and numpy's old ones, follow from the prompt and the sample: a fork has those of its
    parent, so that otherwise all agents would draw alike, and not the same in another run."""
    random.seed(f"{call.seed}/{call.key[1]}")
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(random.getrandbits(32))
