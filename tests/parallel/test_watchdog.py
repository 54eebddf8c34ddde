"""Collectives that hang: what is said of them, by real groups in which some processes do not come."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders.hanging_workers import begin, crossing, late, marked, skipping, slow
from torch import nn

from danlu.parallel.phase import PhaseTracker, track_modules
from danlu.parallel.watchdog import Watchdog

Groups = dict[str, list[Any]]


def test_where_in_words() -> None:
    where = PhaseTracker()
    assert str(where) == ""
    where.begin("checkpoint")
    assert str(where) == "checkpoint"
    where.begin("forward", 17)
    assert str(where) == "forward, step 17"
    where.module = "layers.3.mlp"
    assert str(where) == "layers.3.mlp (forward, step 17)"
    where.begin("backward")
    assert str(where) == "backward, step 17"


class Block(nn.Module):
    def __init__(self, seen: list[str], where: PhaseTracker) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.seen, self.where = seen, where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.where.module)
        x = self.first(x)
        self.seen.append(self.where.module)
        x = self.second(x)
        self.seen.append(self.where.module)
        return x


def test_modules_are_followed_forward_and_backward() -> None:
    where, seen = PhaseTracker(), list[str]()
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": Block(seen, where), "1": Block(seen, where)})
    x = torch.ones(2, 3, requires_grad=True)
    plain = model.layers["1"](model.layers["0"](x))
    assert seen == [""] * 6  # nothing is marked yet
    seen.clear()
    track_modules(model, where)
    out = model.layers["1"](model.layers["0"](x))
    assert torch.equal(out, plain)
    assert seen == [f"layers.{layer}{part}" for layer in (0, 1) for part in ("", ".first", ".second")]
    back: list[str] = []
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.register_hook(lambda gradient, name=name: back.append(f"{name} in {where.module}"))
    out.sum().backward()
    assert set(back) == {
        f"layers.{layer}.{part}.bias in layers.{layer}.{part}" for layer in (0, 1) for part in ("first", "second")
    }


class Gone:
    """A store that the launcher kept, which was killed; counts who asks it."""

    def __init__(self) -> None:
        self.asked = 0
        self.reached = threading.Event()

    def add(self, key: str, number: int) -> int:
        self.asked += 1
        self.reached.set()
        raise dist.DistNetworkError("Connection was likely closed.")


def test_a_launcher_whose_store_went_before_it_is_still_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system closes what a killed process has open before its children have another parent."""
    asked = threading.Event()
    parent = [os.getppid()]
    monkeypatch.setattr("danlu.parallel.watchdog.os.getppid", lambda: parent[0])
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    store = Gone()
    watch = Watchdog(store, 0, 2, 0.4, log=print, end=print, launcher=parent[0]).start()
    try:
        assert store.reached.wait(10)
        assert not asked.is_set()  # control: the launcher is there
        parent[0] = 1
        assert asked.wait(10)
        assert store.asked == 1
    finally:
        watch.stop()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def groups() -> Groups:
    """All of them at once: most of their time they wait, as they should.

    Slow, and not only for the waiting: on a machine that other tests fill, processes start seconds apart, which no
    time limit of a few seconds forgives.
    """
    started = {
        "two": begin(skipping, 2, 8.0, [1], 13.0),
        "four": begin(skipping, 4, 8.0, [2], 13.0),
        "crossing": begin(crossing, 4, 8.0, 7.0),
        "slow": begin(slow, 2, 5.0, 0.8, 5),
        "late": begin(late, 2, 16.0, 11.0),
        "marked": begin(marked, 2, 8.0, 6.0),
    }
    return {name: end() for name, end in started.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "never", "waits"), [("two", 1, "rank 0 has"), ("four", 2, "ranks 0, 1 and 3 have")])
def test_who_never_came(groups: Groups, group: str, never: int, waits: str) -> None:
    for rank, result in enumerate(groups[group]):
        if rank == never:
            continue
        assert result["kind"] == "HangError"  # in the place of gloo's own
        said = result["error"]
        assert re.match(rf"{waits} waited for \d+ s in all_reduce of 2x3, at layers.3.mlp \(backward, step 3\), ", said)
        assert f"; rank {never} never came: it is at layers.2.attention (forward, step 3), in skipping (" in said
        assert said.endswith(". A collective fails after 8 s (parallel.timeout_s)")
        assert result["said"][:1] == ([said] if rank == 0 else [])  # one tells, before the time is up


@pytest.mark.slow
def test_groups_that_wait_for_each_other(groups: Groups) -> None:
    (said,) = groups["crossing"][0]
    if said.startswith("rank 2 has waited"):
        assert re.search(r"in all_reduce of 4, at .*; rank 3 waits in broadcast of 1 instead", said)
        assert "rank 0" not in said  # not of that group
    else:
        assert re.match(r"rank 3 has waited for \d+ s in broadcast of 1, at .*; rank 0 never came: ", said)
        assert "; rank 2 waits in all_reduce of 4 instead, " in said


@pytest.mark.slow
def test_of_a_slow_run_that_moves_nothing_is_told(groups: Groups) -> None:
    # Five times 0.8 s are more than the two and a half after which one collective would be told of.
    assert groups["slow"] == [[], []]


@pytest.mark.slow
def test_one_that_comes_late_is_told_of_and_told_to_have_come(groups: Groups) -> None:
    told, nothing = groups["late"]
    assert nothing == []
    assert "rank 1 never came" in told[0]
    assert told[1:] == ["the collective all_reduce is over, and the run goes on"]


@pytest.mark.slow
def test_the_module_in_whose_backward_gradients_are_summed(groups: Groups) -> None:
    told = groups["marked"][0]
    assert re.search(r"waited for \d s in all_reduce of \d+, at 0 \(backward, step 1\)", told[0])
    assert "rank 1 never came: it is at backward, step 1, in marked (" in told[0]
