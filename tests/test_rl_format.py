"""Reinforcement learning on answers in a form, which all have, with the tokens that it allows in training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders.rollout_servers import VLLM
from builders.tiny_world import World, danlu, metrics
from test_rl_runs import recipe_file
from transformers import AutoTokenizer

from danlu.models.loading import load

pytestmark = [pytest.mark.usefixtures("module_tokenises_here"), pytest.mark.end_to_end]
pytest.importorskip("llguidance")

FORM = {"regex": "<[ae]{1,3}>"}


def test_answers_have_the_form_and_the_trainer_their_probabilities(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ratios(name: str, steps: int) -> list[tuple[float, float]]:
        rollout = {"samples": 4, "max_new_tokens": 12, "format": FORM}
        exact = {"numerics": "exact", "rollout": rollout, "steps": steps, "evaluation": {"every": 2}}
        exact["batch"] = {"prompts": 4, "micro": 1, "updates": 2}  # whose first is compared with the rollout
        assert danlu("train", recipe_file(tiny_world, tmp_path / name, **exact)) == 0
        return [(row["ratio"], row.get("gap", 0.0)) for row in metrics(tmp_path / name) if "ratio" in row]

    of_run = ratios("run", steps=4)
    assert [of_run[0], of_run[2]] == [(1.0, 0.0)] * 2
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    texts = [answer["text"] for line in lines for answer in json.loads(line)["answers"]]
    assert len(texts) == 32 and all(re.fullmatch(FORM["regex"], text) for text in texts)
    assert len(set(texts)) > 2, "they are drawn"
    monkeypatch.setattr("danlu.rl.experience.with_supports", lambda items, completions: list(items))
    whole = ratios("whole", steps=2)
    assert whole[0][0] < 0.9, "over the whole vocabulary they are others"


def test_forms_that_are_refused(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (form, message) in enumerate(
        (
            ({}, "rollout.format: empty. Give one of json_schema, regex, choice and grammar"),
            ({"regex": "a", "choice": ["a"]}, "rollout.format: regex and choice are given together. Give one of"),
            ({"choice": []}, "rollout.format.choice: the list is empty: no answer is left"),
            ({"json_schema": {"enum": []}}, "rollout.format: the grammar cannot be followed: Unsatisfiable schema"),
            ({"regex": "(a"}, "rollout.format: the grammar cannot be followed: "),
        )
    ):
        folder = tmp_path / f"refused{number}"
        assert danlu("train", recipe_file(tiny_world, folder, rollout={"format": form, "max_new_tokens": 6})) != 0
        assert message in " ".join(capsys.readouterr().err.split()), form
        assert not (folder / "metrics.jsonl").exists()


def test_answers_of_vllm_have_the_form_and_the_trainer_their_probabilities(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in, with the tokens that the form left computed here. Controls: training without them, and a server that
    leaves others."""

    def trained(name: str, **settings: Any) -> int:
        server = VLLM(load(tiny_world.base), tokenizer=tiny_world.base, context=64, **settings)
        rollout = {"samples": 4, "max_new_tokens": 12, "format": FORM, "engine": "vllm", "url": server.url}
        try:
            return danlu("train", recipe_file(tiny_world, tmp_path / name, rollout=rollout, steps=2))
        finally:
            server.close()

    def gaps(name: str) -> list[float]:
        return [row["gap"] for row in metrics(tmp_path / name) if "gap" in row]

    assert trained("run") == 0
    assert len(gaps("run")) == 2 and max(gaps("run")) < 1e-4
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    texts = [answer["text"] for line in lines for answer in json.loads(line)["answers"]]
    assert len(texts) == 32 and all(re.fullmatch(FORM["regex"], text) for text in texts)
    capsys.readouterr()
    vocabulary = AutoTokenizer.from_pretrained(tiny_world.base).get_vocab()
    assert trained("fewer", faults={"left_out": (vocabulary["a"],)}) != 0
    assert "canary: answers in rollout.format have log-probabilities that differ" in capsys.readouterr().err
    assert not gaps("fewer")
    monkeypatch.setattr("danlu.rl.experience.with_supports", lambda items, completions: list(items))
    assert trained("whole") == 0
    assert min(gaps("whole")) > 1


def test_what_a_function_logs_is_in_the_run(tiny_world: World, tmp_path: Path) -> None:
    """TRL's `log_extra` and `log_metric`, its token ids and its trainer state."""
    (tmp_path / "reward.py").write_text(
        "def logs(completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):\n"
        "    log_extra('ids', [str(ids) for ids in completion_ids])\n"
        "    log_metric('step', trainer_state.global_step)\n"
        "    log_metric('steps', trainer_state.max_steps)\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    changes = {
        "evaluation": {"every": 2},
        "rewards": [f"{tmp_path / 'reward.py'}:logs"],
        "steps": 2,
        "rollout": {"samples": 2, "max_new_tokens": 4},
    }
    assert danlu("train", recipe_file(tiny_world, tmp_path / "run", **changes)) == 0
    steps = [row for row in metrics(tmp_path / "run") if "reward/logs/step" in row]
    assert [(row["reward/logs/step"], row["reward/logs/steps"]) for row in steps] == [(0, 2), (1, 2)]
    for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines():
        for answer in json.loads(line)["answers"]:
            assert answer["extra"] == {"logs": {"ids": str(answer["tokens"])}}
            assert answer["rewards"]["logs"] == len(answer["tokens"])
