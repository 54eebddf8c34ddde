"""Losses over pairs of answers are the same in every layout, whichever process has none of a step's pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from builders.pair_stage import trained_tensors
from builders.process_group import run_group
from builders.tiny_world import World
from builders.tree_pairs import train
from builders.worst_errors import worst_relative_error


def recipe(world: World, folder: Path, name: str) -> str:
    values = {
        "steps": 3,
        "batch": {"sequences": 1, "micro": 1},  # one of two data ranks has nothing
        "data": {"eval": 5},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 3},
        "parallel": {},
    }
    return str(world.recipe(folder / name, folder / f"{name}.yaml", **values))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [value for line in lines for name, value in line.items() if name in ("loss", "eval_loss", "eval_margin")]


@pytest.mark.distributed
def test_a_process_without_pairs_takes_part(tiny_world: World, tmp_path: Path) -> None:
    assert train([recipe(tiny_world, tmp_path, "alone")]) == [0]
    assert run_group(train, 2, [recipe(tiny_world, tmp_path, "ddp")]) == [[0], [0]]
    alone, ddp = tmp_path / "alone", tmp_path / "ddp"
    assert losses(alone)[0] == pytest.approx(math.log(2)) and losses(alone)[1] != pytest.approx(math.log(2), rel=1e-4)
    assert losses(ddp) == pytest.approx(losses(alone), rel=1e-5)
    assert worst_relative_error(trained_tensors(ddp), trained_tensors(alone)) < 2e-5
