from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from danlu.core.errors import ResourceError
from danlu.core.machine import pid_is_alive
from danlu.core.run_files import RunLock

FORK = multiprocessing.get_context("fork")


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"), pytest.raises(ResourceError) as caught:
        RunLock(tmp_path / "run").acquire()
    assert str(caught.value) == (
        f"{tmp_path / 'run'}: another danlu process (pid {os.getpid()}) is using this run folder. "
        "Wait for it, stop it, or choose another `output`."
    )
    with RunLock(tmp_path / "run"), RunLock(tmp_path / "other"):
        pass


def hold(folder: Path, grandchild: bool) -> None:
    RunLock(folder).acquire()
    if grandchild and os.fork() == 0:
        time.sleep(5)  # a data worker that outlives its parent
        os._exit(0)
    (folder / "held").touch()
    time.sleep(30)


@pytest.mark.parametrize("grandchild", [False, True])
def test_a_kill_releases_the_lock_even_when_a_forked_worker_lives_on(tmp_path: Path, grandchild: bool) -> None:
    child = FORK.Process(target=hold, args=(tmp_path, grandchild))
    child.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.002)
    with pytest.raises(ResourceError, match=f"pid {child.pid}"):
        RunLock(tmp_path).acquire()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert not pid_is_alive(child.pid)
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"the run folder cannot be written: Not a directory\. Choose another"):
        RunLock(tmp_path / "file" / "run").acquire()
