from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from danlu.core.errors import DataError, ResourceError
from danlu.data import resource_limits
from danlu.data.worker_pool import MIN_TASKS_FOR_POOL, UnexpectedError, WorkerPool


@dataclass(frozen=True)
class Squares:
    """A job whose tasks take different times, so that results come back out of order."""

    def start(self) -> Callable[[int], tuple[int, int]]:
        return _square


def _square(task: int) -> tuple[int, int]:
    if task == -1:
        raise DataError("rows.jsonl:3: broken")
    if task == -2:
        raise KeyError("a bug")
    if task == -3:
        os.kill(os.getpid(), 9)
    if task == -5:
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        print("nobody reads this")
        print("nor this", file=sys.stderr, flush=True)
    if task == -4:
        print("a library's chatter")
        time.sleep(30)
    time.sleep(0.01 * (task % 3))
    return task * task, os.getpid()


def test_results_come_in_the_order_of_the_tasks() -> None:
    with WorkerPool(Squares(), 3) as workers:
        results = list(workers.map(range(40)))
    assert [square for square, _ in results] == [task * task for task in range(40)]
    assert 1 < len({process for _, process in results}) <= 3
    assert os.getpid() not in {process for _, process in results}


def test_few_tasks_start_one_process() -> None:
    with WorkerPool(Squares(), 3) as workers:
        assert len({process for _, process in workers.map(range(MIN_TASKS_FOR_POOL - 1))}) == 1
        assert list(workers.map([])) == []
        list(workers.map([1, 2]))
        assert len(workers._processes) == 1, "a second map did not use the process that was there"


def test_errors_of_the_job_arrive() -> None:
    with WorkerPool(Squares(), 1) as workers:
        with pytest.raises(DataError, match=r"rows\.jsonl:3: broken"):
            list(workers.map([1, -1]))
        with pytest.raises(UnexpectedError, match=r"(?s)Traceback.*KeyError: 'a bug'"):
            list(workers.map([1, -2]))


def test_a_killed_process_is_reported() -> None:
    with WorkerPool(Squares(), 1) as workers, pytest.raises(ResourceError, match=r"want of memory.*data\.workers"):
        list(workers.map([1, -3]))


def test_what_a_closed_terminal_sends_and_takes_away_ends_no_work() -> None:
    """Its signal goes to the whole foreground group; the caller is who stops, and it still needs this process to."""
    reading, writing = os.pipe()
    os.close(reading)
    kept = os.dup(2)
    os.dup2(writing, 2)
    try:
        with WorkerPool(Squares(), 1) as workers:
            assert [square for square, _ in workers.map([-5, 3])] == [25, 9]
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writing)


def test_leaving_ends_processes_at_once() -> None:
    with WorkerPool(Squares(), 1) as workers:
        results = workers.map([1, *[-4] * MIN_TASKS_FOR_POOL, 5])
        next(results)
        processes = list(workers._processes)
    assert [process.exit_code() for process in processes] == [-9], "killed, where waiting for the tasks would be 0"


@dataclass(frozen=True)
class Imports:
    """A job that tells which file a module is imported from."""

    def start(self) -> Callable[[str], str]:
        return _imported_from


def _imported_from(module: str) -> str:
    return str(importlib.import_module(module).__file__)


@pytest.mark.parametrize("in_front", ["", "{cwd}"])
def test_files_of_the_working_directory_are_not_imported(
    in_front: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -c` and `python -m` put it into sys.path; tokenize.py is imported before anything else runs."""
    for name in ("regex", "tokenize", "tiktoken", "only_here"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(in_front.format(cwd=tmp_path))
    with WorkerPool(Imports(), 1) as workers:
        found = list(workers.map(["regex", "tokenize", "tiktoken"]))
        with pytest.raises(UnexpectedError, match="No module named 'only_here'"):
            list(workers.map(["only_here"]))
    assert not (tmp_path / "executed").exists()
    assert not any(str(tmp_path) in file for file in found)


@dataclass(frozen=True)
class Stuck:
    """A job that never comes to an end, inside of one operation of C or between many of Python's."""

    def start(self) -> Callable[[str], None]:
        resource_limits.SECONDS_IN_C = 0.3
        return _stuck


def _stuck(task: str) -> None:
    print(os.getpid(), file=sys.stderr, flush=True)
    if task == "in C":
        with resource_limits.limited():
            sum(range(10**12))
    while True:
        pass


def test_a_template_that_cannot_be_interrupted_ends_its_process() -> None:
    with (
        WorkerPool(Stuck(), 1) as workers,
        pytest.raises(DataError, match=r"chat template has worked on one conversation"),
    ):
        list(workers.map(["in C"]))


def test_a_killed_caller_leaves_no_process_at_work() -> None:
    code = "from test_worker_pool import Stuck, WorkerPool; list(WorkerPool(Stuck(), 1).map(['in Python']))"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    caller = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert caller.stderr is not None
    worker = int(caller.stderr.readline())
    os.kill(worker, 0)  # it is there
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _is_alive(worker):
        time.sleep(0.02)
    assert not _is_alive(worker)


def _is_alive(process: int) -> bool:
    """Not so for one that has ended, but of which nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
