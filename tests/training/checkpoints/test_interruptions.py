"""A store under kills, full disks and folders that cannot be written: the last mark must always hold."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from danlu.core.errors import ResourceError
from danlu.parallel.comm import ALONE
from danlu.training.checkpoints import store as store_module
from danlu.training.checkpoints.loading import load_checkpoint
from danlu.training.checkpoints.manifest import MARK
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.checkpoints.verification import verify

# Children are forked: they save within milliseconds, without loading torch again. They use one thread, and leave by
# kill or os._exit, so they share nothing with the test process that could go wrong.
FORK = multiprocessing.get_context("fork")


def tensors(step: int) -> dict[str, dict[str, Tensor]]:
    return {"model": {"a": torch.full((300,), float(step)), "b": torch.full((7, 5), -float(step))}, "optimizer": {}}


def save(store: CheckpointStore, step: int) -> None:
    store.save(step, tensors(step), {"step": step, "double": 2 * step})


def save_and_wait(store: CheckpointStore, step: int) -> None:
    save(store, step)
    store.wait()


def assert_latest_is_whole(folder: Path, at_least: int) -> int:
    """The newest checkpoint verifies and holds the values of its step; returns the step."""
    latest = CheckpointStore(folder).latest()
    if latest is None:
        assert at_least == 0
        return 0
    assert latest.step >= at_least
    assert verify(latest.path) == []
    into = {"model": {"a": torch.zeros(300), "b": torch.zeros(7, 5)}}
    assert load_checkpoint(latest.path, into) == {"step": latest.step, "double": 2 * latest.step}
    assert torch.equal(into["model"]["a"], tensors(latest.step)["model"]["a"])
    assert torch.equal(into["model"]["b"], tensors(latest.step)["model"]["b"])
    return latest.step


def in_child(work: Callable[[], None]) -> Any:
    def run() -> None:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    child = FORK.Process(target=run)
    child.start()
    return child


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path: Path, background: bool) -> None:
    folder = tmp_path / "checkpoints"
    draw = random.Random(11)
    step = 0
    killed_while_saving = 0
    kills, longest_s = 0, 0.12
    while kills < 20 or step <= 5 or killed_while_saving == 0:  # else the instants prove nothing
        kills += 1
        assert kills < 200, "however long it runs, nothing is saved"
        longest_s = (
            longest_s if kills < 20 else min(1.1 * longest_s, 5.0)
        )  # a busy machine takes its time to fork, and to save
        first = step + 1

        def forever(first: int = first) -> None:
            store = CheckpointStore(folder, keep=2, background=background)
            for number in range(first, 1_000_000):
                save(store, number)

        child = in_child(forever)
        time.sleep(draw.uniform(0.01, longest_s))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
        killed_while_saving += any(name.startswith(".") for name in names)
        step = assert_latest_is_whole(folder, at_least=step)
    with CheckpointStore(folder, keep=2) as store:
        save(store, step + 1)
    assert sorted(entry.name for entry in folder.iterdir()) == [f"step-{s:08d}" for s in (step, step + 1)]


DISK_CALLS = ("open", "write", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir", "close")


def die_at_call(number: int) -> None:
    """Make this process vanish, as if killed, just before its `number`-th call that touches the disk."""
    left = [number]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                os._exit(9)
            return real(*args, **options)

        return call

    for name in DISK_CALLS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize(
    ("step", "keep"),
    [(5, 1), pytest.param(6, 1, marks=pytest.mark.slow), pytest.param(6, 2, marks=pytest.mark.slow)],
)  # 5 writes the newest step a second time
def test_killed_before_every_single_disk_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, keep: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a killed process loses nothing it has written; only time
    original = tmp_path / "original"
    with CheckpointStore(original, keep=2) as store:
        save(store, 4)
        save(store, 5)
    calls = 0
    finished = False
    while not finished:
        calls += 1
        folder = tmp_path / f"{calls}" / "checkpoints"
        shutil.copytree(original, folder)

        def work(folder: Path = folder, calls: int = calls) -> None:
            torch.set_num_threads(1)
            die_at_call(calls)
            with CheckpointStore(folder, keep=keep, background=False) as store:
                save(store, step)

        child = in_child(work)
        child.join()
        assert child.exitcode in (0, 9)
        finished = child.exitcode == 0
        assert_latest_is_whole(folder, at_least=5)
        with CheckpointStore(folder, keep=keep) as store:
            save(store, 7)
        assert_latest_is_whole(folder, at_least=7)
        assert all(entry.name.startswith("step-") and (entry / MARK).exists() for entry in folder.iterdir())
        shutil.rmtree(folder)
    assert calls > 30


def test_the_kill_tests_notice_a_store_that_marks_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    with CheckpointStore(folder) as store:
        save(store, 1)
    complete = folder / "step-00000001"
    early = folder / "step-00000002"
    early.mkdir()
    shutil.copy(complete / MARK, early / MARK)
    with pytest.raises(AssertionError):
        assert_latest_is_whole(folder, at_least=1)


@pytest.fixture
def small_file_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_the_system_refuses_midway_leaves_the_old_checkpoint(tmp_path: Path, small_file_limit: None) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1)
    with pytest.raises(ResourceError) as caught:
        store.save(2, {"model": {"large": torch.zeros(100_000)}}, {})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'checkpoints'}: the checkpoint of step 2 cannot be written: it needs ")
    assert "but writing stopped (File too large): a quota, a file-size limit, or another writer." in message
    assert "The checkpoint of step 1 stays." in message
    assert [entry.name for entry in store.folder.iterdir()] == ["step-00000001"]
    assert_latest_is_whole(store.folder, at_least=1)


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", background=False)
    save(store, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=300 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(os, "pwrite", lambda *args: pytest.fail("wrote before checking"))
    with pytest.raises(ResourceError) as caught:
        store.save(2, {"model": {"w": torch.zeros(250_000)}}, {})
    assert str(caught.value) == (
        f"{tmp_path / 'checkpoints'}: the checkpoint of step 2 cannot be written: it needs 1.02 MiB, 300 KiB are free, "
        "741 KiB are missing. The checkpoint of step 1 stays. Free some space, and start the run again: it resumes."
    )
    assert [entry.name for entry in store.folder.iterdir()] == ["step-00000001"]


def steps_of(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.checkpoints()]


def test_on_a_full_disk_what_keep_no_longer_wants_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which each checkpoint takes what is asked for it, with room for `capacity` of them."""
    folder, real = tmp_path / "checkpoints", shutil.disk_usage(tmp_path)
    needed_bytes = store_module._Draft(tensors(1), {"step": 1, "double": 2}, {}, ALONE).plan()
    capacity = 3.5

    def usage(path: Path) -> Any:
        return real._replace(free=int(needed_bytes * (capacity - len(list(folder.glob("step-*"))))))

    for step in (1, 2, 3):
        save(CheckpointStore(folder, keep=3, background=False), step)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    # Kept by the recipe as it was: nothing may go, and the advice is to keep fewer.
    with pytest.raises(ResourceError, match=r"Free some space, or keep fewer checkpoints \(checkpoint\.keep\)"):
        save(CheckpointStore(folder, keep=4, background=False), 4)
    assert steps_of(CheckpointStore(folder)) == [1, 2, 3]
    one = CheckpointStore(folder, keep=1, background=False)  # as advised
    one.make_room()
    assert steps_of(one) == [3]
    save(one, 4)
    assert steps_of(one) == [4]
    # With two, the older one goes where there is no room for both and a new one; the newest never does.
    two = CheckpointStore(folder, keep=2, background=False)
    save(two, 5)
    capacity = 2.5
    save(two, 6)
    assert steps_of(two) == [5, 6]
    assert_latest_is_whole(folder, at_least=6)
    capacity = 1.5
    with pytest.raises(ResourceError):
        save(two, 7)
    assert steps_of(two) == [6]
    with pytest.raises(ResourceError, match=r"The checkpoint of step 6 stays\. Free some space, and start"):
        save(one, 7)
    assert_latest_is_whole(folder, at_least=6)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("call", "at"), [("pwrite", 2), ("fsync", 1), ("fsync", 4), ("fsync", 6)])
def test_a_disk_that_fills_up_at_any_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, call: str, at: int
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", background=background)
    save(store, 1)
    store.wait()
    real, seen = getattr(os, call), [0]

    def full(*args: Any) -> Any:
        seen[0] += 1
        if seen[0] == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(ResourceError, match=r"step 2 cannot be written.*The checkpoint of step 1 stays") as caught:
            save_and_wait(store, 2)
    assert seen[0] >= at
    assert isinstance(caught.value.__cause__, OSError)
    store.wait()  # the failure is raised once
    assert_latest_is_whole(store.folder, at_least=1)
    save(store, 3)
    store.close()
    assert [entry.name for entry in sorted(store.folder.iterdir())] == ["step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    # Below a file: refused for root too, who may write into any read-only folder.
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError) as caught:
        save(CheckpointStore(tmp_path / "file" / "checkpoints"), 1)
    assert str(caught.value) == (
        f"{tmp_path}/file/checkpoints: the checkpoint of step 1 cannot be written: Not a directory "
        f"({tmp_path}/file/checkpoints). There is no earlier checkpoint."
    )


def test_leftovers_of_dead_runs_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead = in_child(lambda: None)
    dead.join()
    store = CheckpointStore(tmp_path / "checkpoints", background=False)
    save(store, 1)
    for name in (f".step-00000009.{dead.pid}.tmp", f".step-00000009.{os.getppid()}.tmp", "step-00000008", "notes"):
        (store.folder / name).mkdir()
        (store.folder / name / "model").write_text("x")
    save(store, 2)
    names = {entry.name for entry in store.folder.iterdir()}
    assert names == {"step-00000001", "step-00000002", "notes", f".step-00000009.{os.getppid()}.tmp"}


def test_an_interrupted_save_cleans_up_and_passes_the_interrupt_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", background=False)
    save(store, 1)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda value, **options: interrupted() if options else "{}")
        with pytest.raises(KeyboardInterrupt):
            save(store, 2)
    assert [entry.name for entry in store.folder.iterdir()] == ["step-00000001"]
