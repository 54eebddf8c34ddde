"""Answers' programs and the judge, brought together: a sandbox for each answer, one judge for all."""

from __future__ import annotations

import json
import marshal
import math
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from danlu.core.errors import ResourceError
from danlu.rewards.programs.judge import START_S
from danlu.rewards.programs.pod import CONTEST, PROGRAM
from danlu.rewards.programs.sandbox import GUEST, JUDGE, Limits, Sandbox
from danlu.rewards.programs.test_forms import ProgramTest

JUDGE_MEMORY_MIB = 4096
ORDER_BYTES = 256
GRACE_S = 5.0
"""The seconds for the judge to report that a test took too long."""


@dataclass(frozen=True)
class ProgramResult:
    """Whether a program passes a test, and why not."""

    passed: bool
    reason: str = ""


def judge_program(
    code: str | None, tests: Sequence[ProgramTest], *, timeout_s: float, memory_mib: int, sandbox: str
) -> list[ProgramResult]:
    """The result of each test of a program; code None: on the empty program, which needs no sandbox.

    Every process of the program has ended when this returns. Raises ResourceError where a sandbox does not start.
    """
    limits = Limits(memory_mib, math.ceil(timeout_s) + 1)
    with _Program(code, limits, sandbox) as program:
        return [program.judge(test, timeout_s) for test in tests]


class _Program:
    """A program, and the sandbox that it runs in: one for all tests, as long as they leave it whole."""

    def __init__(self, code: str | None, limits: Limits, kind: str) -> None:
        self._code, self._limits, self._kind = code, limits, kind
        self._key = (os.getpid(), kind, limits)
        self._guest: Sandbox | None = None

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *error: object) -> None:
        if self._guest is not None and self._guest.rest() and not self._guest.excess():
            _resting.setdefault(self._key, []).append(self._guest)
            self._guest = None
        self._end()

    def judge(self, test: ProgramTest, timeout_s: float) -> ProgramResult:
        """Runs a test, in a new sandbox where it does not start in the one that there is."""
        for _ in range(2):
            start_s = START_S if self._guest is None else GRACE_S
            if self._guest is None and self._code is not None:
                self._guest = self._resting() or Sandbox(self._kind, GUEST, self._limits, is_shared_limit=True)
            asked = {"code": self._code, "timeout_s": timeout_s, "start_s": start_s, **test.asked()}
            state, reason = self._state(asked, test.modules)
            if state not in ("passed", "failed"):
                self._end()
            if state != "not started":
                return ProgramResult(state == "passed", reason)
        raise ResourceError(f"rewards of kind code: the sandbox of a program did not start: {reason}")

    def _state(self, asked: dict[str, Any], modules: str) -> tuple[str, str]:
        """The state of a test that the judge runs on the program: passed, failed, lost, late, not started."""
        session, judges_session = socket.socketpair()
        channel, judges_channel = socket.socketpair()
        with session, judges_session, channel, judges_channel:
            if self._guest is not None:
                order = PROGRAM if asked["form"] == "source" else CONTEST
                if not self._guest.hand_over(order, [channel.fileno()]):
                    return "not started", "the sandbox has ended"
            descriptors = [judges_session, *([judges_channel] if self._guest is not None else [])]
            if not _judge(self._kind).hand_over(
                modules.encode().ljust(ORDER_BYTES), [each.fileno() for each in descriptors]
            ):
                return "not started", "the judge has ended"
            for each in (channel, judges_session, judges_channel):
                each.close()
            return self._verdict(session, asked)

    def _verdict(self, session: socket.socket, asked: dict[str, Any]) -> tuple[str, str]:
        deadline = time.monotonic() + asked["start_s"] + asked["timeout_s"] + GRACE_S
        try:
            session.settimeout(GRACE_S + START_S)
            session.sendall(marshal.dumps(asked))
            said = b""
            while not said.endswith(b"\n"):
                if time.monotonic() > deadline:
                    return "late", f"longer than {asked['timeout_s']:g} s"
                tick_s = 1.0 if self._guest is None else self._guest.tick_s
                if select.select([session], [], [], tick_s)[0]:
                    said += (chunk := session.recv(1 << 16))
                    if not chunk:
                        return self._silence(session)
                elif self._guest is not None and (excess := self._guest.excess()):
                    return "lost", excess
        except OSError:
            return self._silence(session)
        if self._guest is not None and (excess := self._guest.excess()):
            return "lost", excess
        state, reason = json.loads(said)
        return str(state), str(reason)

    def _silence(self, session: socket.socket) -> tuple[str, str]:
        """Returns the outcome where the judge's process for a test ended without a verdict."""
        judge = _judges.get((os.getpid(), self._kind))
        if judge is None or judge.has_ended:
            return "not started", "the judge has ended"
        return "failed", "the test ended the process that ran it"

    def _resting(self) -> Sandbox | None:
        """A sandbox that has run other answers, holds nothing of them, and has not been ended by the system since."""
        waiting = _resting.get(self._key, [])
        while True:
            try:
                sandbox = waiting.pop()
            except IndexError:
                return None
            if not sandbox.has_ended:
                return sandbox
            sandbox.end()

    def _end(self) -> None:
        if self._guest is not None:
            self._guest.end()
            self._guest = None


_resting: dict[tuple[int, str, Limits], list[Sandbox]] = {}
"""Sandboxes that wait for the next answer, by process, kind and limits; appending and popping need no lock."""
_judges: dict[tuple[int, str], Sandbox] = {}
_judges_lock = threading.Lock()


def _judge(kind: str) -> Sandbox:
    """The judge of this process, started where there is none (any more)."""
    key = (os.getpid(), kind)
    with _judges_lock:
        judge = _judges.get(key)
        if judge is not None and judge.has_ended:
            _judges.pop(key).end()
            judge = None
        if judge is None:
            judge = _judges[key] = Sandbox(kind, JUDGE, Limits(JUDGE_MEMORY_MIB), is_shared_limit=False)
        return judge
