"""Remarks on rollouts that teach nothing: after some steps of it, once, and not for one that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from danlu.core.types import StepMetrics
from danlu.recipe import Recipe, load
from danlu.stages.rollout_remarks import REMARKED_STEPS, RolloutRemarks, rollout_numbers
from danlu.training.recorders import Remarks


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def recipe(**changes: Any) -> Recipe:
        (tmp_path / "endless.py").write_text("class Endless: ...\n")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
        (tmp_path / "model").mkdir(exist_ok=True)
        values = {
            "stage": "grpo",
            "model": str(tmp_path / "model"),
            "data": str(tmp_path / "rows.jsonl"),
            "rewards": [{"kind": "length", "most": 4}],
            "output": str(tmp_path / "run"),
            "steps": 200,
            **changes,
        }
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
        return load(tmp_path / "r.yaml").recipe

    return recipe


EQUAL = {"no_signal": 1.0, "reward_std": 0.3, "truncated": 0.5}
SIGNAL = {"no_signal": 0.9, "reward_std": 0.0, "truncated": 0.5}
TRUNCATED = {"no_signal": 0.0, "reward_std": 0.3, "truncated": 1.0}


def said(remarks: RolloutRemarks, *steps: dict[str, float]) -> list[list[str]]:
    return [list(remarks(metrics)) for metrics in steps]


def test_equal_rewards_of_each_prompt_are_told_once(recipe: Any) -> None:
    remarks = RolloutRemarks(recipe())
    *before, last = said(remarks, *[EQUAL] * (REMARKED_STEPS - 1), SIGNAL, *[EQUAL] * REMARKED_STEPS)
    assert not any(before)  # a step with signal begins the count anew
    (text,) = last
    assert text.startswith("all answers to a prompt have had the same reward in the last 5 logged steps")
    assert not any(said(remarks, *[EQUAL] * 20, SIGNAL, *[EQUAL] * 20))


def test_where_prompts_are_not_looked_at_apart_all_rewards_count(recipe: Any) -> None:
    for objective in ({"kind": "reinforce"}, {"kind": "ppo"}):
        remarks = RolloutRemarks(recipe(stage="rl", objective=objective))
        assert not any(said(remarks, *[EQUAL] * 20))  # prompts of one answer each have no other reward to differ from
        assert said(remarks, *[SIGNAL] * REMARKED_STEPS)[-1][0].startswith("all answers have had the same reward")


def test_answers_that_are_all_cut_off_are_told_once(recipe: Any) -> None:
    remarks = RolloutRemarks(recipe(rollout={"max_new_tokens": 6}))
    *before, last = said(remarks, *[TRUNCATED] * REMARKED_STEPS)
    assert not any(before) and last[0].startswith("all answers have been cut off at rollout.max_new_tokens (6)")
    assert not any(said(remarks, *[TRUNCATED] * 20))
    assert not any(said(RolloutRemarks(recipe(rollout={"max_new_tokens": 1})), *[TRUNCATED] * 20))
    assert not any(said(RolloutRemarks(recipe()), *[{**TRUNCATED, "truncated": 0.99}] * 20))


@pytest.mark.parametrize(
    ("out_of_turns", "limits"),
    [(1.0, "environment.max_turns (3)"), (0.5, "rollout.max_new_tokens (6) or environment.max_turns (3)")],
)
def test_episodes_that_have_no_end_are_cut_off_by_their_turns(recipe: Any, out_of_turns: float, limits: str) -> None:
    changes = {"rollout": {"max_new_tokens": 6}, "rewards": None, "steps": 1}
    environment = {"kind": "python", "path": "endless.py:Endless", "max_turns": 3}
    remarks = RolloutRemarks(recipe(**changes, environment=environment))
    (text,) = said(remarks, {**TRUNCATED, "out_of_turns": out_of_turns})[0]
    assert text == (
        f"all answers have been cut off at {limits} in the only logged step. Raise it, or see that the environment "
        "returns Done"
    )


def test_answers_without_a_reward_are_told_once(recipe: Any) -> None:
    remarks = RolloutRemarks(recipe(reward_limits={"failures": 0.4}))
    *before, last = said(remarks, *[{**SIGNAL, "unrewarded": 0.25}] * REMARKED_STEPS)
    assert not any(before)
    assert last[0].startswith("some answers have had no reward in the last 5 logged steps (25% of this one's)")
    assert "reward_limits.failures (40%)" in last[0]
    assert not any(said(remarks, *[{**SIGNAL, "unrewarded": 0.25}] * 20))
    assert not any(said(RolloutRemarks(recipe()), *[{**SIGNAL, "unrewarded": 0.0}] * 20))


@pytest.mark.parametrize(
    ("steps", "every", "lasting", "words"),
    [(3, 1, 3, "the last 3 logged steps"), (40, 20, 2, "the last 2 logged steps"), (1, 1, 1, "the only logged step")],
)
def test_a_run_that_logs_fewer_steps_is_told_at_its_end(
    recipe: Any, steps: int, every: int, lasting: int, words: str
) -> None:
    for metrics in (EQUAL, TRUNCATED, {**SIGNAL, "unrewarded": 0.1}):
        remarks = RolloutRemarks(recipe(steps=steps, log={"every": every}))
        *before, last = said(remarks, *[metrics] * lasting)
        assert not any(before) and len(last) == 1 and f"in {words}" in last[0]


class Shown:
    """Stands in for what shows a run's progress."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, dict[str, Any]]] = []

    def event(self, step: int, event: str, **values: Any) -> None:
        self.events.append((step, event, values))


def test_they_are_shown_with_the_step(recipe: Any) -> None:
    shown = Shown()
    recorder = Remarks(RolloutRemarks(recipe()), [shown])  # type: ignore[arg-type]
    for step in range(1, 8):
        recorder.step(StepMetrics(step, 0.0, 0.0, 0.0, 1, 1, 1.0, 1, EQUAL))
    ((step, event, values),) = shown.events
    assert (step, event) == (REMARKED_STEPS, "remark") and "the same reward" in values["text"]


def test_the_numbers_of_a_rollout() -> None:
    values = {"reward": 0.5, "length": 34.25, "entropy": 1.25, "kl/k3": 0.0125, "approx_kl": 9.0, "truncated": 0.125}
    said = "reward 0.500 length 34.2 entropy 1.250 kl 0.0125 cut 12% "
    assert rollout_numbers(values) == said
    del values["kl/k3"]
    assert rollout_numbers(values) == said.replace("kl 0.0125", "approx_kl 9.0000")
    assert rollout_numbers({"accuracy": 0.5}) == ""
