"""`danlu.train` in several processes, from the main thread of a program and from another one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from builders.tiny_world import World, metrics

from danlu.api.training import Run, train

pytestmark = pytest.mark.distributed


def test_a_program_starts_processes(tiny_world: World, tmp_path: Path) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=3)
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(train(recipe, {"seed": 5}, processes=2)))
    thread.start()
    thread.join()
    (run,) = runs
    assert run == Run(tmp_path / "run", 3, 0, tmp_path / "run" / "model")
    alone = train(recipe, {"seed": 5, "output": tmp_path / "alone"})
    losses, expected = ([line["loss"] for line in metrics(each.folder) if "loss" in line] for each in (run, alone))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses != pytest.approx([loss * 1.001 for loss in expected], rel=1e-5)  # control
    assert (run.folder / "logs" / "rank-1.txt").is_file() and not (alone.folder / "logs" / "rank-1.txt").exists()
