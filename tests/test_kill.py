"""kill -9 while tokenising, training, saving, exporting: resumed each time, a run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, differences, last_state, start

CHANGES = {
    "data": {"eval": 10},
    "evaluation": {"every": 4},
    "ema": 0.9,
    "checkpoint": {"every": 2, "keep": 2, "keep_best": True},
}
DISK_CALLS = ("open", "write", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir")


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(call: str, text: str) -> None:
    """Kill this process when it is about to make a system call about a path with `text` in it."""
    real = getattr(os, call)

    def watched(*arguments: Any, **options: Any) -> Any:
        if text in " ".join(str(argument) for argument in arguments):
            kill_me()
        return real(*arguments, **options)

    setattr(os, call, watched)


def die_before_disk_call(number: int) -> None:
    """Kill this process just before its `number`-th call that touches the disk, in whichever thread that is."""
    left = [number]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                kill_me()
            return real(*arguments, **options)

        return call

    for name in DISK_CALLS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.fixture(scope="module")
def whole(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    process = start(["train", tiny_world.recipe(output, **CHANGES)], output.with_name("log.txt"))
    process.join()
    assert process.exitcode == 0
    return output


def test_killed_at_the_worst_instants(tiny_world: World, tmp_path: Path, whole: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    recipe = tiny_world.recipe(run, **CHANGES)
    for call, text, newest in (
        ("rename", "recipe.yaml", None),  # before anything is there
        ("rename", "/step-00000004", "step-00000002"),  # written, but not under its name
        ("rename", "step-00000006/COMPLETE", "step-00000004"),  # under its name, but not marked
        ("rmdir", "step-00000004", "step-00000008"),  # half deleted
        ("rename", "run/model-ema", "step-00000012"),  # exported, but not under its name
        ("rename", "run/model", "step-00000012"),
    ):
        process = start(["train", recipe], log, partial(die_before, call, text))
        process.join()
        assert process.exitcode == -signal.SIGKILL, log.read_text()
        assert newest is None or last_state(run)[0].name == newest
    process = start(["train", recipe], log)
    process.join()
    said = log.read_text()
    assert process.exitcode == 0, said
    assert "step-00000006 is half-written (the run was stopped while saving it) and is not used\n" in said
    assert differences(whole, run) == []
    assert not [entry.name for entry in run.iterdir() if entry.name.endswith((".tmp", ".writing", ".replaced"))]
    assert not [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]


@pytest.mark.slow
def test_killed_at_twenty_random_instants(tiny_world: World, tmp_path: Path, whole: Path) -> None:
    draw = random.Random(5)
    kills: Counter[str] = Counter()
    attempt = 0
    while kills.total() < 20:
        attempt += 1
        run, log = tmp_path / f"run{attempt}", tmp_path / f"log{attempt}.txt"
        # A cache of its own: rows are tokenised anew, and that is interrupted too.
        cache = tmp_path / f"cache{attempt}"
        recipe = tiny_world.recipe(run, **{**CHANGES, "data": {**CHANGES["data"], "cache": str(cache)}})
        most = 30  # the first kill comes before there are tokens; the whole run makes some 900 disk calls
        finished = False
        while not finished:
            by_clock = most > 30 and draw.random() < 0.4
            process = start(
                ["train", recipe], log, None if by_clock else partial(die_before_disk_call, draw.randrange(1, most))
            )
            process.join(draw.uniform(0.1, 2.0) if by_clock else None)
            process.kill()
            process.join()
            finished = process.exitcode == 0
            if not finished:
                assert process.exitcode == -signal.SIGKILL, log.read_text()
                kills[phase(run, cache)] += 1
            most = 400
        assert differences(whole, run) == []
    assert kills["tokenising"] and kills["saving"], kills


def phase(run: Path, cache: Path) -> str:
    """What a killed run was doing, by what it left behind."""
    if list(cache.glob("*.unfinished")) or not list(cache.glob("*/COMPLETE")):
        return "tokenising"
    if list(run.glob(".model*")):
        return "exporting"
    folders = list((run / "checkpoints").glob("*step-*"))
    if any(folder.name.startswith(".") or not (folder / "COMPLETE").is_file() for folder in folders):
        return "saving"
    return "training"
