"""One process at a time, also on a disk that knows no locks."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from danlu.core import file_lock
from danlu.core.errors import ResourceError
from danlu.core.file_lock import AlreadyLocked, FileLock, is_lock_of
from danlu.core.machine import process_start_ticks
from danlu.core.run_files import RunLock
from danlu.data.token_cache import TokenCache
from danlu.training.run_folder import check_output_folder

FORK = multiprocessing.get_context("fork")


def refuse(number: int) -> Any:
    def flock(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=lambda number: errno.errorcode[number])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(request.param))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_without_locks_two_runs_cannot_share_a_folder_either(tmp_path: Path, no_locks: None) -> None:
    for number in (1, 2, 3):
        with RunLock(tmp_path):
            assert names(tmp_path) == [".lock", f".lock.{number}"], "what is below is cleared away"
            with pytest.raises(ResourceError) as caught:
                RunLock(tmp_path).acquire()
            assert str(caught.value) == (
                f"{tmp_path}: another danlu process (pid {os.getpid()}) is using this run folder. "
                "Wait for it, stop it, or choose another `output`."
            )
        assert (tmp_path / f".lock.{number}").read_text() == "released"
    check_output_folder(tmp_path)  # they belong to a run
    assert is_lock_of(".lock.3", ".lock") and not is_lock_of(".lock.old", ".lock")


def test_an_error_of_another_kind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(errno.EIO))
    with pytest.raises(ResourceError, match="the run folder cannot be written: Input/output error"):
        RunLock(tmp_path).acquire()


def hold(path: Path) -> None:
    FileLock(path).acquire()
    if os.fork() == 0:
        time.sleep(5)  # a data worker that outlives its parent
        os._exit(0)
    path.with_name("held").touch()
    time.sleep(600)  # it is killed before


def test_what_a_killed_process_held_is_free(tmp_path: Path, no_locks: None) -> None:
    child = FORK.Process(target=hold, args=(tmp_path / "lock",))
    child.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.002)
    with pytest.raises(AlreadyLocked) as caught:
        FileLock(tmp_path / "lock").acquire()
    assert str(caught.value) == f"pid {child.pid}"
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    FileLock(tmp_path / "lock").acquire()
    assert (tmp_path / "lock.2").read_text().startswith(f"{os.getpid()} ")


def test_a_number_given_to_another_process_meanwhile_holds_nothing(tmp_path: Path, no_locks: None) -> None:
    host = socket.gethostname()
    (tmp_path / "lock.7").write_text(f"{os.getpid()} 12 {host}\n")
    FileLock(tmp_path / "lock").acquire()
    assert (tmp_path / "lock.8").read_text() == f"{os.getpid()} {process_start_ticks(os.getpid())} {host}\n"


def test_where_no_process_tells_when_it_began_its_number_decides(
    tmp_path: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "process_start_ticks", lambda pid: "")  # as on macOS
    first = FileLock(tmp_path / "lock")
    first.acquire()
    assert (tmp_path / "lock.1").read_text() == f"{os.getpid()} - {socket.gethostname()}\n"
    with pytest.raises(AlreadyLocked):
        FileLock(tmp_path / "lock").acquire()
    (tmp_path / "lock.1").write_text(f"{2**22 + 1} - {socket.gethostname()}\n")  # of nobody
    FileLock(tmp_path / "lock").acquire()
    assert names(tmp_path) == ["lock", "lock.2"]


def test_of_another_machine_a_person_must_say_that_it_is_gone(tmp_path: Path, no_locks: None) -> None:
    (tmp_path / ".lock.4").write_text("1234 99 node7\n")
    with pytest.raises(ResourceError) as caught:
        RunLock(tmp_path).acquire()
    said = str(caught.value)
    assert "another danlu process (pid 1234 on node7) is using this run folder" in said
    assert "This disk has no locks (flock)" in said and said.endswith(f"delete {tmp_path / '.lock.4'}")
    (tmp_path / ".lock.4").unlink()
    with RunLock(tmp_path):
        assert names(tmp_path) == [".lock", ".lock.1"]


def test_a_process_that_ended_before_it_wrote_its_name_holds_nothing(
    tmp_path: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "_WRITING_S", 0.05)
    (tmp_path / "lock.1").touch()
    FileLock(tmp_path / "lock").acquire()
    assert names(tmp_path) == ["lock", "lock.2"]


def take_turns(folder: Path) -> None:
    for _ in range(15):
        lock = FileLock(folder / "lock")
        lock.acquire(wait=True)
        with (folder / "turns").open("a") as file:
            file.write(f"{os.getpid()} in\n")
            file.flush()
            time.sleep(0.001)
            file.write(f"{os.getpid()} out\n")
        lock.release()


def test_of_many_one_has_it_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOSYS))
    monkeypatch.setattr(file_lock, "_POLL_S", 0.001)
    (tmp_path / "lock.1").write_text(f"{2**22 + 1} 5 {socket.gethostname()}\n")  # stale: all of them see that at once
    children = [FORK.Process(target=take_turns, args=(tmp_path,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    turns = (tmp_path / "turns").read_text().splitlines()
    assert len(turns) == 4 * 15 * 2
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        assert re.fullmatch(r"\d+ in", first) and second == first.replace("in", "out")


def test_tokens_are_kept_without_locks(tmp_path: Path, no_locks: None) -> None:
    cache = TokenCache(tmp_path)
    with cache._locked("rows-1") as free:
        assert free
        with cache._locked("rows-1", wait=False) as again:
            assert not again
    with cache._locked("rows-1", wait=False) as free:
        assert free
