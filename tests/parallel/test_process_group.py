"""Leaving and waiting for each other, where others are gone."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from danlu.core.errors import RecipeError
from danlu.parallel import process_group
from danlu.parallel.exit_reports import is_peer_failure
from danlu.parallel.process_group import agree_on_devices, device_of
from danlu.parallel.world import World


class Gone:
    """A store whose keeper was killed."""

    def add(self, key: str, number: int) -> int:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is rank 0 of two; gives the other's store."""

    def become(store: Any) -> Any:
        watch = SimpleNamespace(stop=lambda: None)
        world = World(0, 2, 0, "127.0.0.1", 29500, "a test")
        monkeypatch.setattr(process_group, "_membership", process_group._Membership(store, watch, world))
        return store

    return become


def test_what_was_saved_is_not_called_lost_because_the_launcher_is_gone(member: Any) -> None:
    member(Gone())
    process_group.leave_process_group()
    assert not process_group.is_first_to_report()
    with pytest.raises(dist.DistError):  # control: before the work is done it is an error
        process_group.untimed_barrier("data")


def test_nobody_waits_for_one_that_has_told_of_an_error(member: Any) -> None:
    store = member(dist.HashStore())
    store.set_timeout(timedelta(seconds=5))
    store.add("assemble/model", 1)
    process_group.untimed_barrier("model")  # the other is there already
    store.add("told", 1)
    with pytest.raises(ConnectionError, match="another process has failed") as caught:
        process_group.untimed_barrier("data")
    assert is_peer_failure(caught.value)


@pytest.mark.parametrize(
    ("rank", "local_rank", "devices", "taken"),
    [
        (0, 0, 1, 0),
        (5, 5, 8, 5),
        (13, 5, 8, 5),
        (3, 3, 1, 0),  # srun --gpus-per-task=1: each task sees a device of its own, as number 0
        (11, 3, 1, 0),
        (6, None, 4, 2),  # nobody said: by the rank
        (6, None, 1, 0),
        (1, 1, 2, 1),
        (4, 4, 4, None),  # one process more than devices
        (7, 7, 2, None),
        (0, 0, 0, None),
        (3, None, 0, None),
    ],
)
def test_which_device_a_process_takes(rank: int, local_rank: int | None, devices: int, taken: int | None) -> None:
    if taken is not None:
        assert device_of(rank, local_rank, devices) == taken
        return
    with pytest.raises(RecipeError, match=f"of this machine finds only {devices} CUDA devices"):
        device_of(rank, local_rank, devices)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], None),
        (["GPU-a", "GPU-b", "GPU-a"], "ranks 0 and 2 have all taken GPU-a"),
        (["GPU-a"] * 3, "ranks 0-2 have all taken GPU-a"),
        (["GPU-a", "GPU-b", None], "rank 2: device: cuda, and process number 2 of this machine finds only 2 CUDA dev"),
    ],
)
def test_every_process_is_told_who_has_no_device_of_its_own(devices: list[str | None], said: str | None) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    errors: dict[int, RecipeError | None] = {}

    def take(rank: int, device: str | None) -> None:
        found: str | RecipeError | None = device
        try:
            try:
                found = device or str(device_of(rank, rank, 2))
            except RecipeError as error:
                found = error
            agree_on_devices(World(rank, len(devices), rank, "here", 1, "a test"), store, found)
            errors[rank] = None
        except RecipeError as error:
            errors[rank] = error

    threads = [threading.Thread(target=take, args=pair) for pair in enumerate(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == len(devices)
    for error in errors.values():
        assert error is None if said is None else said in str(error) and "device: cpu" in str(error)
