"""Asynchronous rollouts as whole runs, with processes that are real: they learn, are killed, stopped and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from builders.other_versions import with_other_versions
from builders.process_group import run_group
from builders.tiny_world import World, metrics
from builders.train_worker import train
from test_rl_runs import recipe_file, run, steps

from danlu.core.errors import CheckpointError, TrainingError
from danlu.recipe import load
from danlu.rl.rollout_processes import MOST_DEATHS, RolloutProcesses
from danlu.run.replay import replay
from danlu.run.train import train as train_here
from danlu.training import loop

pytestmark = pytest.mark.distributed

ASYNCHRONOUS = {"rollout": {"samples": 4, "max_new_tokens": 6, "staleness": 2}}


@pytest.fixture(scope="module", autouse=True)
def tokenised_here(module_tokenises_here: None) -> None:
    """All tests here are whole runs over few rows."""


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_it_learns_from_answers_of_bounded_age(tiny_world: World, tmp_path: Path) -> None:
    more = {"rollout": {"samples": 8, "max_new_tokens": 6, "staleness": 2}, "steps": 48}
    lines = run(tiny_world, tmp_path / "run", **more)
    held_out = [line["eval_reward"] for line in metrics(tmp_path / "run") if "eval_reward" in line]
    assert held_out[-1] > held_out[0] + 2
    assert max(line["staleness_max"] for line in lines) == 2 and lines[0]["staleness"] == 0
    assert any(line["ratio"] != 1 for line in lines)  # to what tokens were drawn from
    recorded = rollouts(tmp_path / "run")
    assert [line["number"] for line in recorded] == list(range(48 * 4))
    for line in recorded:
        for answer in line["answers"]:
            assert answer["rewards"] == {"letters": float(answer["text"].count("e"))}
            assert line["step"] - 3 <= answer["versions"][0][0] <= answer["versions"][-1][0] <= line["step"] - 1


def test_the_weights_that_are_handed_over_are_those_that_are_trained(tiny_world: World, tmp_path: Path) -> None:
    """A rollout whose tokens are all of the present weights has the log-probabilities of the trainer."""
    more: dict[str, Any] = {"numerics": "exact", "precision": "bf16", "checkpoint": {"every": 1, "keep": 20}}
    adapter = {"adapter": {"kind": "lora", "rank": 4, "targets": "all-linear"}}
    for name, extra in {"full": {}, "lora": adapter}.items():
        lines = run(tiny_world, tmp_path / name, **more, **extra, **ASYNCHRONOUS)
        assert lines[0]["gap"] == 0 and lines[0]["staleness"] == 0
        assert all(line["gap"] > 0 for line in lines if line["staleness"] > 0)  # control
        assert any(line["staleness"] > 0 for line in lines)


def test_a_process_that_is_killed_is_started_again_and_nothing_is_trained_twice(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    original = RolloutProcesses.update

    def update(self: RolloutProcesses, version: int, weights: Any) -> None:
        original(self, version, weights)
        if version in (2, 5):
            killed.extend(self.process_ids)
            os.kill(self.process_ids[0], signal.SIGKILL)

    monkeypatch.setattr(RolloutProcesses, "update", update)
    said: list[str] = []
    monkeypatch.setattr("danlu.stages.rollout_processes.print_status", said.append)
    lines = run(tiny_world, tmp_path / "run", **ASYNCHRONOUS)
    assert len(set(killed)) == 2 and len(lines) == 8
    assert [line["number"] for line in rollouts(tmp_path / "run")] == list(range(32))
    assert len(said) == 2 and all("was ended by SIGKILL; a new one is asked for its" in line for line in said)


def test_a_process_that_keeps_dying_ends_the_run_with_what_it_wrote(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statement = "import sys; print('no such library', file=sys.stderr); sys.exit(7)"
    monkeypatch.setattr("danlu.rl.rollout_processes.START", statement)
    file = recipe_file(tiny_world, tmp_path / "run", **ASYNCHRONOUS)
    with pytest.raises(TrainingError, match="ended with exit code 7; 3 have ended so without an answer") as raised:
        train_here(load(file), log=lambda line: None)
    assert "no such library" in str(raised.value) and MOST_DEATHS == 3


@pytest.mark.parametrize("after", [1, 4])
def test_a_run_that_is_stopped_goes_on_with_the_answers_it_has(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    more = {"batch": {"prompts": 4, "micro": 1, "updates": 2}, "rollout": {**ASYNCHRONOUS["rollout"], "staleness": 3}}
    original = loop.take_step

    def take_step_and_interrupt(run: Any) -> None:
        original(run)
        if run.state.step == after:
            os.kill(os.getpid(), signal.SIGINT)

    file = recipe_file(tiny_world, tmp_path / "run", **more)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", take_step_and_interrupt)
        assert train_here(load(file), log=lambda line: None).exit_code == 130
    assert len(steps(tmp_path / "run")) == after
    assert train_here(load(file), log=lambda line: None).exit_code == 0
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(1, 9))
    assert [line["number"] for line in rollouts(tmp_path / "run")] == list(range(16))


def test_a_rollout_is_replayed_with_the_weights_that_drew_each_token(tiny_world: World, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "numerics": "exact",
        "checkpoint": {"every": 3, "keep": 20},
        "objective": {"importance": {}},
        "data": {"max_length": 96},
    }
    folder = tmp_path / "run"
    # Long ones, one at a time: while they grow there are updates, however fast the machine is.
    run(tiny_world, folder, **more, rollout={"samples": 4, "max_new_tokens": 24, "staleness": 2, "sequences": 1})
    recorded = rollouts(folder)
    assert any(len(answer["versions"]) > 1 for line in recorded[16:] for answer in line["answers"])
    result = replay(folder, 6, log=lambda line: None)
    assert result.difference is None and (result.from_step, result.rollouts, result.answers) == (3, 3, 16)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    result = replay(folder, 6, log=lambda line: None)
    assert result.difference is None and (result.from_step, result.rollouts) == (0, 6)
    recorded = with_other_versions(recorded, staleness=2)  # control
    (folder / "rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in recorded))
    assert replay(folder, 6, log=lambda line: None).difference is not None
    del recorded[5]["answers"][1]["versions"]
    (folder / "rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in recorded))
    with pytest.raises(CheckpointError, match="does not say with which weights sample 1 of prompt 5 was drawn"):
        replay(folder, 6, log=lambda line: None)


@pytest.mark.parametrize(
    ("size", "parallel"), [(2, {"shard": "zero3"}), (2, {"tensor": 2, "sequence": True}), (2, {"pipeline": 2})]
)
def test_several_trainers_share_the_answers_of_their_processes(
    tiny_world: World, tmp_path: Path, size: int, parallel: dict[str, Any]
) -> None:
    more = {"rollout": {**ASYNCHRONOUS["rollout"], "processes": 2}, "steps": 4, "precision": "fp32"}
    file = recipe_file(tiny_world, tmp_path / "run", **more, parallel=parallel)
    assert all(ended == [(4, 0)] for ended in run_group(train, size, [str(file)]))
    lines = steps(tmp_path / "run")
    assert lines[0]["gap"] < 1e-5 < lines[-1]["gap"] and lines[-1]["staleness"] > 0
    assert [line["number"] for line in rollouts(tmp_path / "run")] == list(range(16))
