"""Rewards of steps in whole runs: they are written down, trained on where they end, and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_world import World
from test_rl_runs import run

from danlu.core.types import Pack
from danlu.rl.estimators import GaeEstimator, Judged
from danlu.run.replay import replay

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

STEPS = """
def steps(completion, **row):
    middle = max(1, len(completion) // 2)
    return [(middle, completion.count("e")), (len(completion), -0.25)] if completion else 0.0
"""
SHORT: dict[str, Any] = {
    "steps": 4,
    "batch": {"prompts": 4, "micro": 1, "updates": 2},
    "evaluation": {"every": None},
    "checkpoint": {"every": 4},
}


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(STEPS)
    return f"{tmp_path / 'rewards.py'}:steps"


def test_ppo_has_rewards_where_steps_end(
    tiny_world: World, tmp_path: Path, reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Judged] = []
    real = GaeEstimator.estimate

    def recorded(self: GaeEstimator, judged: Judged) -> tuple[list[Pack], dict[str, float]]:
        seen.append(judged)
        return real(self, judged)

    monkeypatch.setattr(GaeEstimator, "estimate", recorded)
    run(tiny_world, tmp_path / "run", **SHORT, stage="ppo", rewards=[reward])
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    answers = [answer for line in lines[:4] for answer in line["answers"]]
    assert len(answers) == len(seen[0].step_rewards) == 16
    for answer, steps, length in zip(answers, seen[0].step_rewards, seen[0].lengths.tolist(), strict=True):
        written, (places, values) = answer["steps"]["steps"], steps[0]
        assert written["ends"] == [max(1, len(answer["text"]) // 2), len(answer["text"])]
        assert written["values"] == values.tolist() == [answer["text"].count("e"), -0.25]
        assert answer["rewards"]["steps"] == sum(values) and 0 <= places[0] <= places[1] < length
    assert any(places[0] < places[1] for places, _ in (steps[0] for steps in seen[0].step_rewards))  # control


def test_a_run_with_process_supervision_is_replayed(tiny_world: World, tmp_path: Path, reward: str) -> None:
    more: dict[str, Any] = {**SHORT, "objective": {"process_supervision": True}, "rewards": [reward]}
    lines = run(tiny_world, tmp_path / "run", **more)
    assert not np.isclose(lines[0]["advantage"], 0, atol=1e-4)  # of tokens, which have sums of several steps'
    assert replay(tmp_path / "run", 3, log=lambda line: None).difference is None
    file = tmp_path / "run" / "rollouts.jsonl"
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    for line in recorded[:4]:
        for answer in line["answers"]:
            answer["steps"]["steps"]["values"] = [-5.0 * value for value in answer["steps"]["steps"]["values"]]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in recorded))
    assert replay(tmp_path / "run", 3, log=lambda line: None).difference is not None  # control
