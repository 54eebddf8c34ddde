"""`danlu eval` of language models on pairs: the numbers of the run's own last evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu, metrics, write_rows

ROWS = [
    {"prompt": f"What is {number}?", "chosen": f"It is number {number}.", "rejected": "No idea" + "!" * (number % 3)}
    for number in range(24)
]
NUMBERS = ("loss", "accuracy", "margin", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert danlu("eval", *arguments, "--json") == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


@pytest.mark.parametrize(
    ("name", "changes", "objective"),
    [
        ("full", {"stage": "dpo"}, "dpo, against "),
        ("adapter", {"stage": "dpo", "adapter": "lora"}, "dpo, against the model without its adapter"),
        ("simpo", {"stage": "simpo"}, "simpo, without a reference"),
    ],
)
def test_a_run_is_judged_as_its_own_evaluations_judge_it(
    tiny_world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tokenising_here: None,
    name: str,
    changes: dict[str, Any],
    objective: str,
) -> None:
    train, held_out = (write_rows(tmp_path / f"{part}.jsonl", ROWS[part::2]) for part in (0, 1))
    recipe = tiny_world.recipe(
        tmp_path / name,
        **changes,
        model={"path": str(tiny_world.base), "config": None, "tokenizer": None},
        data={"train": str(train), "eval": str(held_out)},
        batch=None,
        steps=3,
        evaluation={"every": 3},
    )
    assert danlu("train", recipe) == 0
    line = [line for line in metrics(tmp_path / name) if "eval_loss" in line][-1]
    cache = f"data.cache={tmp_path / 'cache'}"
    values = evaluated(capsys, tmp_path / name, "--data", held_out, cache)
    assert {each: values[each] for each in NUMBERS} == pytest.approx(
        {each: line[f"eval_{each}"] for each in NUMBERS}, rel=1e-5, abs=1e-6
    )
    assert values["pairs"] == 12 and values["objective"].startswith(objective)
    assert danlu("eval", tmp_path / name, "--data", held_out, cache) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"accuracy   {values['accuracy']:.2%} of 12 pairs: ") and f"objective  {objective}" in out
    if name != "full":
        return
    other = evaluated(capsys, tmp_path / name, "--data", train, cache)
    assert other["loss"] != pytest.approx(values["loss"], rel=1e-5)  # control
    itself = evaluated(capsys, tmp_path / name, "--data", held_out, cache, "--reference", tmp_path / name)
    assert itself["loss"] == pytest.approx(0.693147, abs=1e-6) and itself["margin"] == pytest.approx(0, abs=1e-6)
    plain = evaluated(capsys, tiny_world.base, "--data", held_out, cache)
    assert plain["objective"] == "dpo, without a reference"
    expected = 0.1 * (plain["logps/chosen"] - plain["logps/rejected"])
    assert plain["margin"] == pytest.approx(expected, rel=1e-5)
    assert danlu("eval", tiny_world.base, "--data", tiny_world.text, "--reference", tiny_world.base) == 2
    assert "--reference: only pairs of answers (chosen, rejected) are compared" in capsys.readouterr().err
