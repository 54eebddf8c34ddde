"""Asynchronous rollouts with an environment, as whole runs: the same episodes, taken up again, and replayed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from builders.other_versions import with_other_versions
from builders.tiny_world import World
from test_environment_runs import environment, lines_of
from test_rl_runs import recipe_file, run, steps

from danlu.recipe import load
from danlu.rl.rollout_processes import RolloutProcesses
from danlu.run.replay import replay
from danlu.run.train import train as train_here
from danlu.training import loop

pytestmark = pytest.mark.distributed

# One answer grows at a time: while the episodes of a rollout are drawn there are updates, however fast the machine is.
EPISODES: dict[str, Any] = {
    "data": {"max_length": 96},
    "rollout": {"samples": 2, "max_new_tokens": 8, "stop_strings": ["a", "t"], "staleness": 2, "sequences": 1},
    "numerics": "exact",
    "checkpoint": {"every": 2, "keep": 20},
    "objective": {"importance": {}},
}


@pytest.fixture(scope="module", autouse=True)
def tokenised_here(module_tokenises_here: None) -> None:
    """All tests here are whole runs over few rows."""


def answers_of(folder: Path) -> list[dict[str, Any]]:
    return [answer for line in lines_of(folder) for answer in line["answers"]]


def test_with_weights_that_stay_as_they_are_the_same_episodes_are_played(tiny_world: World, tmp_path: Path) -> None:
    more = EPISODES | environment(tiny_world) | {"steps": 2, "optimizer": {"learning_rate": 0.0}}
    synchronous = {**more, "rollout": {**more["rollout"], "staleness": 0, "sequences": 256}}
    run(tiny_world, tmp_path / "beside", **more)
    run(tiny_world, tmp_path / "synchronous", **synchronous)
    for answer, other in zip(*(answers_of(tmp_path / name) for name in ("beside", "synchronous")), strict=True):
        assert answer.pop("versions") is not None
        assert answer == other
    assert any(len(answer["turns"]) > 2 for answer in answers_of(tmp_path / "beside"))
    run(tiny_world, tmp_path / "changed", **{**synchronous, "optimizer": {"learning_rate": 1e-2}})  # control
    tokens = [[answer["tokens"] for answer in answers_of(tmp_path / name)] for name in ("changed", "synchronous")]
    assert tokens[0][:8] == tokens[1][:8] and tokens[0] != tokens[1]


def test_a_run_that_is_stopped_goes_on_with_its_episodes_and_is_replayed(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, restored = tmp_path / "run", list[dict[str, Any]]()
    original, restore = loop.take_step, RolloutProcesses.restore

    def take_step_and_interrupt(run: Any) -> None:
        original(run)
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def noted(self: RolloutProcesses, state: dict[str, Any]) -> None:
        restored.extend(answer for entry in state["requests"] for answer in entry["answers"])
        restore(self, state)

    file = recipe_file(tiny_world, folder, **EPISODES, **environment(tiny_world), steps=5)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", take_step_and_interrupt)
        assert train_here(load(file), log=lambda line: None).exit_code == 130
    monkeypatch.setattr(RolloutProcesses, "restore", noted)
    assert train_here(load(file), log=lambda line: None).exit_code == 0
    assert [line["step"] for line in steps(folder)] == list(range(1, 6))
    assert [line["number"] for line in lines_of(folder)] == list(range(20))
    assert restored  # prompts that were asked ahead
    for step, start in ((5, 4), (2, 0)):
        result = replay(folder, step, log=lambda line: None)
        assert (result.difference, result.from_step) == (None, start)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)  # all rollouts are made again, up to that of the last step
    assert replay(folder, 5, log=lambda line: None).difference is None
    lines = with_other_versions(lines_of(folder), staleness=2)  # control
    (folder / "rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert replay(folder, 5, log=lambda line: None).difference is not None
