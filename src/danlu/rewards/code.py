"""A reward for programs: the code of an answer is run against tests, in a process without network and with limits."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from danlu.errors import ResourceError
from danlu.rewards.protocol import JudgedAnswer, column_of

CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
MIB = 2**20
MOST_FILE_MIB = 16
MOST_PROCESSES = 64
NO_NAMESPACE = 127
"""The exit code of a process that could not leave the network."""

# What the new process does before anything of an answer: it goes into a user namespace, in which it may make a network
# namespace without interfaces (unshare(2)), sets limits that it cannot raise again, and reads the program. It is a
# program of its own because a fork of this process would have torch's locks without the threads that hold them.
LAUNCHER = """
import ctypes, os, resource, sys
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG, SIGKILL = 0x10000000, 0x40000000, 1, 9
libc = ctypes.CDLL(None)
if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
    os._exit({no_namespace})
libc.prctl(PR_SET_PDEATHSIG, SIGKILL)  # behind unshare, which takes it back: who waits for the program may be killed
for kind, most in {limits}.items():
    resource.setrlimit(getattr(resource, kind), (most, most))
receipt, program, report = sys.stdin.readline(), sys.stdin.read(), os.dup(1)
nothing = os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0), os.dup2(nothing, 1)
exec(compile(program, "<answer>", "exec"), {{"__name__": "__main__"}})
os.write(report, receipt.encode())
"""


@dataclass(frozen=True)
class Code:
    """The share of tests that the last code block of an answer passes; 0 for an answer without code.

    A test is a piece of Python in the column, a list of them or one, run behind the code: it passes where all of it has
    run without an error, which code that exits before it does not reach. Each runs in a process of its own, in an empty
    folder, without network, and is ended at the limits.
    Files of the machine can still be read, so code of strangers belongs into a container.

    Raises ResourceError where the system cannot take the network away.
    """

    column: str
    timeout_s: float = 5.0
    memory_mib: int = 512
    processes: int = 2
    """How many answers `RewardRunner` has judged at a time."""

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        require_isolation()
        return [self._judge(answer) for answer in answers]

    def _judge(self, answer: JudgedAnswer) -> float | None:
        tests = column_of(answer, self.column)
        tests = [tests] if isinstance(tests, str) else list(tests)
        if not tests:
            return None
        code = code_of(answer.text)
        if code is None:
            return 0.0
        passed = sum(passes(f"{code}\n\n{test}\n", self.timeout_s, self.memory_mib) for test in tests)
        return passed / len(tests)


def code_of(text: str) -> str | None:
    """The last fenced block of Python in a text; the text itself where it has no fence and is Python; else None."""
    blocks = CODE_BLOCK.findall(text)
    if blocks:
        return str(blocks[-1])
    if "```" in text:
        return None
    try:
        compile(text, "<answer>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text if text.strip() else None


def passes(program: str, timeout_s: float, memory_mib: int) -> bool:
    """Whether a Python program runs to its last line within the limits. One that exits before that does not."""
    receipt = secrets.token_hex(16)  # which the program, were it to print it, would have to know
    return _run(f"{receipt}\n{program}", timeout_s, memory_mib)[1] == f"{receipt}\n"


@cache
def require_isolation() -> None:
    """Raises ResourceError where a process cannot be kept from the network."""
    if not sys.platform.startswith("linux"):
        raise ResourceError("rewards of kind code: programs are kept from the network by Linux namespaces only")
    if _run("", timeout_s=30.0, memory_mib=512)[0] == NO_NAMESPACE:
        raise ResourceError(
            "rewards of kind code: this system does not let a process make a network namespace of its own, so answers' "
            "programs would have the network. Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or "
            "give a function of your own that runs them elsewhere"
        )


def _run(program: str, timeout_s: float, memory_mib: int) -> tuple[int | None, str]:
    """The exit code of a program, None where it did not end in time, and what the launcher printed."""
    seconds = int(timeout_s) + 1
    limits = {
        "RLIMIT_CPU": seconds,
        "RLIMIT_AS": memory_mib * MIB,
        "RLIMIT_FSIZE": MOST_FILE_MIB * MIB,
        "RLIMIT_NPROC": MOST_PROCESSES,
        "RLIMIT_CORE": 0,
    }
    launcher = LAUNCHER.format(no_namespace=NO_NAMESPACE, limits=limits)
    with (
        tempfile.TemporaryDirectory(prefix="danlu-code-") as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as printed,  # files: a pipe would be open as long as anything that the program started
    ):
        given.write(program.encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", launcher],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _end(process)
        printed.seek(0)
        return process.returncode, printed.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
