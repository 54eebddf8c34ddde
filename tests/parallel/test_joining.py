"""Leaving and waiting for each other, where others are gone."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from danlu.parallel import joining
from danlu.parallel.endings import is_consequence


class Gone:
    """A store whose keeper was killed."""

    def add(self, key: str, number: int) -> int:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is rank 0 of two; gives the other's store."""

    def become(store: Any) -> Any:
        watch = SimpleNamespace(stop=lambda: None)
        monkeypatch.setattr(joining, "_membership", joining._Membership(store, watch, 0, 2))
        return store

    return become


def test_what_was_saved_is_not_called_lost_because_the_launcher_is_gone(member: Any) -> None:
    member(Gone())
    joining.leave()
    assert not joining.first_to_tell()
    with pytest.raises(dist.DistError):  # control: before the work is done it is an error
        joining.assemble("data")


def test_nobody_waits_for_one_that_has_told_of_an_error(member: Any) -> None:
    store = member(dist.HashStore())
    store.set_timeout(timedelta(seconds=5))
    store.add("assemble/model", 1)
    joining.assemble("model")  # the other is there already
    store.add("told", 1)
    with pytest.raises(ConnectionError, match="another process has failed") as caught:
        joining.assemble("data")
    assert is_consequence(caught.value)
