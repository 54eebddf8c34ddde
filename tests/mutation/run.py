"""Applies each mutation to a copy of the tree, runs its tests there, and says which of them noticed.

    make mutation                                            all of them: some ten minutes on two cores
    PYTHONPATH=tests python -m mutation.run --only optim/    those whose file or text has this in it

Tests run in processes forked from one that has torch, transformers and pytest loaded, but nothing of danlu. The test
that fails first is run once more without the mutation, where it has to pass.

Exit code 1 where fewer than 95 of 100 are noticed, 2 where one cannot be judged: it cannot be applied, its tests cannot
be run, or the one that noticed does not pass without it either.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import pytest

from mutation import (
    table,
    table_curate,
    table_data,
    table_models,
    table_rewards,
    table_rl,
    table_run,
    table_serving,
    table_synthesis,
    table_verify,
)
from mutation.table import Mutation

TABLES = (
    table,
    table_curate,
    table_data,
    table_models,
    table_rewards,
    table_rl,
    table_run,
    table_serving,
    table_synthesis,
    table_verify,
)
EVERY_MUTATION = tuple(mutation for each in TABLES for mutation in each.MUTATIONS)
ROOT = Path(__file__).resolve().parents[2]
WANTED = 0.95
LIMIT_S = 240.0  # for one mutation: tests that do not come to an end have noticed it as well
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one says that tests could not be run
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist")
SERVER = multiprocessing.get_context("forkserver")
MODULES = ["numpy", "torch", "torch._dynamo", "transformers", "tokenizers", "hypothesis", "pytest"]


@dataclass(frozen=True)
class Verdict:
    """What became of one mutation."""

    mutation: Mutation
    said: str  # killed, survived, or why it cannot be judged
    seconds: float
    by: str = ""  # the test that failed first

    @property
    def judged(self) -> bool:
        return self.said in ("killed", "survived")


class Tree:
    """A copy of the tree in which one mutation after the other is applied and taken back."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(source, self.root, ignore=NOT_COPIED, symlinks=True)
        self._bytecode = folder / "bytecode"  # of its own: danlu may be installed from the original
        self._shared = source.parent / "shared" / "data"  # where tests of the original would look
        self._writes = 0

    def judge(self, mutation: Mutation) -> Verdict:
        """Whether some test fails with the mutation, and passes without it."""
        started = time.monotonic()
        file = self.root / "src" / "danlu" / mutation.file
        before = file.read_text(encoding="utf-8")
        self._write(file, mutation.apply(self.root))
        chosen = ["-k", mutation.only] if mutation.only else []
        try:
            code, failed = self.test([*(f"tests/{name}" for name in mutation.tests.split()), *chosen])
        finally:
            self._write(file, before)
        if code == FAILED and failed:
            code, _ = self.test([failed])
            said = "killed" if code == PASSED else f"{failed} fails without it too"
        else:
            # Tests that do not end would, as far as is known, end without it.
            said = {PASSED: "survived", FAILED: "killed"}.get(code, f"its tests ended with exit code {code}")
        return Verdict(mutation, said, time.monotonic() - started, failed)

    def test(self, arguments: Sequence[str]) -> tuple[int, str]:
        """pytest's exit code on the tree as it is, and the first test that failed; (FAILED, "") if it does not end."""
        receives, sends = SERVER.Pipe(duplex=False)
        args = (str(self.root), str(self._bytecode), str(self._shared), list(arguments), sends)
        process = SERVER.Process(target=_tests, args=args)
        process.start()
        sends.close()
        try:
            return receives.recv() if receives.poll(LIMIT_S) else (FAILED, "")
        except EOFError:
            return -1, ""
        finally:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with whatever tests have left running
            process.join()

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        # Byte code is thrown away by the second and the size of its source, which both can be those of the last one.
        self._writes += 1
        stamp = time.time() + self._writes
        os.utime(file, (stamp, stamp))


class _First:
    """Notes the test that fails first."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _tests(root: str, bytecode: str, shared: str, arguments: list[str], result: Connection) -> None:
    """In a forked process: pytest on a copy of the tree, its output thrown away."""
    os.setsid()
    # A shell's background jobs ignore these, and so would everything that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    os.chdir(root)
    inside = [os.path.join(root, name) for name in ("src", "tests")]
    sys.path[:0] = inside
    sys.pycache_prefix = bytecode
    os.environ.update(PYTHONPATH=os.pathsep.join(inside), PYTHONPYCACHEPREFIX=bytecode, OMP_NUM_THREADS="1")
    os.environ.setdefault("DANLU_SHARED_DATA", shared)
    assert not any(name.partition(".")[0] in ("danlu", "builders") for name in sys.modules), "loaded from another tree"
    first = _First()
    code = pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments], plugins=[first])
    result.send((int(code), first.failed))


def judged(source: Path, mutations: Sequence[Mutation], workers: int) -> list[Verdict]:
    """A verdict for each, in order; said as they come."""
    SERVER.set_forkserver_preload(MODULES)
    with tempfile.TemporaryDirectory(prefix="danlu-mutation-") as name:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(workers):
            trees.put(Tree(source, Path(name) / str(number)))

        def one(mutation: Mutation) -> Verdict:
            tree = trees.get()
            try:
                found = tree.judge(mutation)
            finally:
                trees.put(tree)
            print(f"{found.said:<9} {found.seconds:5.1f} s  {mutation.name}  {found.by}".rstrip(), flush=True)
            return found

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, mutations))


def main(
    arguments: Sequence[str] | None = None, source: Path = ROOT, table: Sequence[Mutation] = EVERY_MUTATION
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations with this in their file or text")
    parser.add_argument("--workers", type=int, default=1, help="copies of the tree that are worked on at a time")
    asked = parser.parse_args(arguments)
    mutations = [mutation for mutation in table if asked.only in mutation.name]
    stale = {mutation.name: problem for mutation in mutations if (problem := mutation.problem(source))}
    for mutation, problem in stale.items():
        print(f"cannot be applied: {mutation}: {problem}")
    if stale or not mutations:
        return 2
    started = time.monotonic()
    verdicts = judged(source, mutations, asked.workers)
    killed = sum(verdict.said == "killed" for verdict in verdicts)
    minutes = (time.monotonic() - started) / 60
    print(f"\n{killed} of {len(verdicts)} mutations killed ({killed / len(verdicts):.1%}) in {minutes:.1f} minutes")
    for verdict in verdicts:
        if verdict.said != "killed":
            print(f"  {verdict.said}: {verdict.mutation.name}")
    if not all(verdict.judged for verdict in verdicts):
        return 2
    return 0 if killed >= WANTED * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
