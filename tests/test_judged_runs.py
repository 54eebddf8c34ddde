"""A run may be judged by another number than the loss: what is kept, exported and shown follows it by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest
from builders.tiny_world import World, danlu, metrics

from danlu.core.errors import RecipeError
from danlu.recipe import load
from danlu.run.train import train
from danlu.stages.protocols import Stage, StageData
from danlu.stages.reader import PackReader
from danlu.stages.table import STAGES
from danlu.training import loop
from danlu.training.evaluation import Scores, evaluate
from danlu.training.runs import read_run

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

JUDGED: dict[str, Any] = {"data": {"eval": 10}, "checkpoint": {"every": 12, "keep": 1, "keep_best": True}}


def test_what_a_run_is_judged_by_is_shown_by_name(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter([0.1, 0.4, 0.3, 0.4, 0.2, 0.1])  # the loss falls all the while

    def evaluated(*arguments: Any, **options: Any) -> Scores | None:
        scores = evaluate(*arguments, **options)
        assert scores is not None
        return replace(scores, metrics={**scores.metrics, "accuracy": next(accuracies)})

    monkeypatch.setattr(loop, "evaluate", evaluated)
    evaluation = {"every": 2, "metric": "accuracy"}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", evaluation=evaluation, **JUDGED)) == 0
    lines = [line for line in metrics(tmp_path / "run") if "eval_loss" in line]
    best = max(lines, key=lambda line: (line["eval_accuracy"], -line["step"]))
    assert best["step"] == 4 and min(lines, key=lambda line: line["eval_loss"])["step"] == 12
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["judged"] == {
        "metric": "accuracy",
        "last": lines[-1]["eval_accuracy"],
        "best": best["eval_accuracy"],
    }
    info = read_run(tmp_path / "run")
    assert (info.metric, info.evaluation_value) == ("accuracy", lines[-1]["eval_accuracy"])
    assert info.best_evaluation_value == best["eval_accuracy"]
    said = capsys.readouterr().err
    assert f"exporting step {best['step']}, which had the highest evaluation accuracy (" in said
    assert danlu("runs", "list", tmp_path / "run") == 0
    assert f"accuracy {lines[-1]['eval_accuracy']:.4f}" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "200")
    assert danlu("checkpoint", "list", tmp_path / "run") == 0
    out = capsys.readouterr().out.splitlines()
    assert "eval loss" in out[0] and "eval accuracy" in out[0]
    (marked,) = [line for line in out if line.endswith("best")]
    assert marked.split()[0] == str(best["step"]) and f"{best['eval_accuracy']:.4f}" in marked


@pytest.mark.parametrize("metric", ["loss/a.jsonl", "perplexity"])
def test_sources_have_losses_of_their_own(tiny_world: World, tmp_path: Path, metric: str) -> None:
    rows = tiny_world.chat.read_text().splitlines(keepends=True)
    for name, lines in (("a.jsonl", rows[:20]), ("b.jsonl", rows[20:40])):
        (tmp_path / name).write_text("".join(lines))
    held_out = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    file = tiny_world.recipe(
        tmp_path / "run", steps=2, data={"eval": held_out}, evaluation={"every": 1, "metric": metric}
    )
    assert danlu("train", file) == 0
    lines = [line for line in metrics(tmp_path / "run") if "eval_loss" in line]
    assert read_run(tmp_path / "run").best_evaluation_value == min(line[f"eval_{metric}"] for line in lines)


def test_a_metric_that_evaluations_do_not_report_is_told_before_rows_are_read(
    tiny_world: World, tmp_path: Path
) -> None:
    class NeverRead(PackReader):
        def read(self, stream: TextIO) -> StageData:
            pytest.fail("rows are read after what can be wrong without them")

    sft = STAGES["sft"]
    stage = Stage(NeverRead, sft.builder, sft.objective, sft.models, sft.evaluation, metrics=sft.metrics)
    loaded = load(tiny_world.recipe(tmp_path / "run", data={"eval": 10}, evaluation={"every": 2, "metric": "acuracy"}))
    with pytest.raises(RecipeError) as error:
        train(loaded, log=lambda line: None, stage=stage)
    assert str(error.value) == (
        "evaluation.metric: 'acuracy' is nothing that evaluations of this recipe report. They report loss (lower is "
        "better), perplexity (lower is better), accuracy (higher is better)"
    )
