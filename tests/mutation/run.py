"""Applies each mutation to a copy of the tree, runs its tests there, and says which of them noticed.

    make mutation                                            all of them: a quarter of an hour on two cores
    PYTHONPATH=tests python -m mutation.run --only optim/    those whose file or text has this in it

Exit code 1 where fewer than 95 of 100 are noticed, 2 where one cannot be judged: it cannot be applied, or its tests do
not pass without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from mutation.table import MUTATIONS, Mutation

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
WANTED = 0.95
LIMIT_S = 600.0  # for one mutation: tests that do not come to an end have noticed it as well
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one says that tests could not be run
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist")


@dataclass(frozen=True)
class Verdict:
    """What became of one mutation."""

    mutation: Mutation
    said: str  # killed, survived, or why it cannot be judged
    seconds: float

    @property
    def judged(self) -> bool:
        return self.said in ("killed", "survived")


class Tree:
    """A copy of the tree in which one mutation after the other is applied and taken back."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(source, self.root, ignore=NOT_COPIED, symlinks=True)
        self._writes = 0
        inside = os.pathsep.join(str(self.root / name) for name in ("src", "tests"))
        shared = source.parent / "shared" / "data"  # where tests of the original would look
        # Byte code of its own: danlu may be installed from the original.
        self._environment = {
            "DANLU_SHARED_DATA": str(shared),
            **os.environ,
            "PYTHONPATH": inside,
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
            "OMP_NUM_THREADS": "1",
        }

    def judge(self, mutation: Mutation) -> Verdict:
        """Whether some test fails with the mutation."""
        started = time.monotonic()
        file = self.root / "src" / "danlu" / mutation.file
        before = file.read_text(encoding="utf-8")
        self._write(file, mutation.apply(self.root))
        try:
            code = self.test(mutation)
        finally:
            self._write(file, before)
        said = {PASSED: "survived", FAILED: "killed"}.get(code, f"its tests ended with exit code {code}")
        return Verdict(mutation, said, time.monotonic() - started)

    def test(self, mutation: Mutation) -> int:
        """The exit code of its tests on the tree as it is; FAILED for tests that do not end."""
        files = [f"tests/{name}" for name in mutation.tests.split()]
        chosen = ["-k", mutation.only] if mutation.only else []
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *files, *chosen]
        try:
            ended = subprocess.run(
                command, cwd=self.root, env=self._environment, capture_output=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return FAILED
        return ended.returncode

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        # Byte code is thrown away by the second and the size of its source, which both can be those of the last one.
        self._writes += 1
        stamp = time.time() + self._writes
        os.utime(file, (stamp, stamp))


def judged(source: Path, mutations: Sequence[Mutation], workers: int) -> list[Verdict]:
    """A verdict for each, in order; said as they come.

    Tests that do not pass without a mutation would say nothing by failing with it, so they are run without first.
    """
    with tempfile.TemporaryDirectory(prefix="danlu-mutation-") as name:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(workers):
            trees.put(Tree(source, Path(name) / str(number)))

        def on_a_tree(work: Callable[[Tree, Mutation], T]) -> Callable[[Mutation], T]:
            def one(mutation: Mutation) -> T:
                tree = trees.get()
                try:
                    return work(tree, mutation)
                finally:
                    trees.put(tree)

            return one

        with ThreadPoolExecutor(workers) as pool:
            alike = {(mutation.tests, mutation.only): mutation for mutation in mutations}
            codes = dict(zip(alike, pool.map(on_a_tree(Tree.test), alike.values()), strict=True))

            def verdict(tree: Tree, mutation: Mutation) -> Verdict:
                code = codes[mutation.tests, mutation.only]
                failed = Verdict(mutation, f"without it its tests end with exit code {code}", 0.0)
                found = tree.judge(mutation) if code == PASSED else failed
                print(f"{found.said:<9} {found.seconds:5.1f} s  {mutation.name}", flush=True)
                return found

            return list(pool.map(on_a_tree(verdict), mutations))


def main(arguments: Sequence[str] | None = None, source: Path = ROOT, table: Sequence[Mutation] = MUTATIONS) -> int:
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
    verdicts = judged(source, mutations, asked.workers)
    killed = sum(verdict.said == "killed" for verdict in verdicts)
    print(f"\n{killed} of {len(verdicts)} mutations killed ({killed / len(verdicts):.1%})")
    for verdict in verdicts:
        if verdict.said != "killed":
            print(f"  {verdict.said}: {verdict.mutation.name}")
    if not all(verdict.judged for verdict in verdicts):
        return 2
    return 0 if killed >= WANTED * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
