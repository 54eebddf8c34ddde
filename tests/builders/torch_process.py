"""Programs in processes that have imported torch and nothing else: forked from one, which imports it once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

FORK_EACH = """
import json, os, sys, tempfile, torch, traceback
for line in sys.stdin:
    program = json.loads(line)
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            code = 1
            try:
                exec(compile(program, "program", "exec"), {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        print(json.dumps([code, printed.read().decode()]), flush=True)
"""


@dataclass(frozen=True)
class TorchProcess:
    """A process that has imported torch, and has run nothing of it: not all of torch can be forked once it has run."""

    process: subprocess.Popen[str]

    def run(self, program: str, exit_code: int = 0) -> str:
        """Runs a program in a process of its own, which has to end with this code; returns what it prints."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(program), file=self.process.stdin, flush=True)
        code, printed = json.loads(self.process.stdout.readline())
        assert code == exit_code, printed
        assert isinstance(printed, str)
        return printed


@pytest.fixture(scope="session")
def torch_process() -> Iterator[TorchProcess]:
    command = [sys.executable, "-c", FORK_EACH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield TorchProcess(process)
        process.kill()  # rather than told to end: a child that the tests have forked may hold its pipe open
