"""summary.json says what metrics.jsonl and the model say, also of a run that came about in parts."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from builders.tiny_run import tiny_run
from builders.tiny_world import World, danlu
from torch import nn

from danlu.assembly.parameters import parameters_of, trained_parameters_of
from danlu.core.errors import ResourceError
from danlu.models.loading import load
from danlu.training import loop
from danlu.training.state import Run
from danlu.training.summary import few_steps, flat_loss, seconds_in, write_summary

EVALUATED = {"data": {"eval": 10}, "evaluation": {"every": 4}}


def summed_up(run: Run, result: Path) -> Path:
    model = run.learner.model
    return write_summary(run, result, parameters_of(model), trained_parameters_of(model))


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"step": step, "loss": value} for step, value in enumerate(values, 1)] + [{"step": 1, "event": "spike"}]


def test_a_loss_that_did_not_fall_is_told() -> None:
    said = flat_loss(losses(*[2.0, 2.02] * 20))
    assert said is not None and said.startswith("the loss did not fall: 2.000 in the first 5 logged steps, 2.020 in")
    assert "Try another optimizer.learning_rate" in said
    assert flat_loss(losses(*[2.0] * 20, *[2.5] * 20)) is not None
    assert flat_loss(losses(*[2.0] * 20, *[1.9] * 20)) is None
    assert flat_loss(losses(*[2.0] * 10)) is None and flat_loss(losses(9.0)) is None  # too few to say
    said = flat_loss(losses(0.693, 13.9, 4.7))  # but a rise is no matter of chance
    assert said is not None and said.startswith(
        "the loss rose, from 0.693 in the first logged step to 4.700 in the last"
    )
    assert flat_loss(losses(2.0, 2.3, 2.35)) is None and flat_loss(losses(2.0, 2.3, 2.45)) is not None
    assert flat_loss(losses(-1.0, -0.9, -0.7)) is not None
    assert flat_loss(losses(*[2.0] * 30, math.nan)) is None and flat_loss([]) is None


def test_a_handful_of_steps_is_told() -> None:
    said = few_steps(3, "8 x 1024 tokens")
    assert said is not None and said.startswith("only 3 optimizer steps of 8 x 1024 tokens: little is learnt")
    assert "only 1 optimizer step of" in (few_steps(1, "x") or "") and few_steps(20, "x") is None


def summary_of(run: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return told


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def stopped_at(step: int) -> Callable[..., Any]:
    """The loop's accumulate, with a Ctrl-C in that step."""
    real = loop.accumulate

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] == step:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **options)

    return accumulate


def test_the_numbers_are_those_of_the_metrics(tiny_world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert danlu("train", tiny_world.recipe(run, **EVALUATED)) == 0
    told, lines = summary_of(run), lines_of(run)
    steps = [line for line in lines if "loss" in line]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(steps) == 12 and len(losses) == 3
    assert told["steps"] == 12 and told["tokens"] == sum(line["tokens"] for line in steps)
    assert told["tokens_per_second"] == median(line["tokens_per_second"] for line in steps)
    assert told["seconds"] == steps[-1]["elapsed_s"] + lines[-1]["eval_s"]
    assert told["peak_memory_bytes"] >= max(line["memory_bytes"] for line in steps)
    assert told["loss"] == steps[-1]["loss"]
    assert told["evaluation"] == {"last": losses[-1], "best": min(losses)}
    weights = run / "model" / "model.safetensors"
    assert told["result"] == {"path": "model", "bytes": weights.stat().st_size}
    size = sum(parameter.numel() for parameter in load(run / "model").parameters())
    assert told["parameters"] == told["trained_parameters"] == size
    # Controls: a step or an evaluation fewer would be noticed.
    assert told["tokens"] != sum(line["tokens"] for line in steps[1:])
    assert told["evaluation"]["last"] != losses[-2]


def test_parts_of_a_run_add_up(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    recipe = tiny_world.recipe(run, **EVALUATED)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate", stopped_at(6))
        assert danlu("train", recipe) == 130
    assert not (run / "summary.json").exists()
    lines = lines_of(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6]
    lines[-1]["elapsed_s"] += 1000  # as if those six steps had taken so long
    lines[-1]["memory_bytes"] = 2**60  # and so much
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert danlu("train", recipe) == 0
    assert danlu("train", tiny_world.recipe(whole, **EVALUATED)) == 0
    told, uninterrupted = summary_of(run), summary_of(whole)
    elapsed = [line["elapsed_s"] for line in lines_of(run) if "elapsed_s" in line]
    assert elapsed == sorted(elapsed) and len(elapsed) == 12
    assert told["seconds"] > elapsed[-1] > elapsed[5] > 1000 > uninterrupted["seconds"]
    assert told["peak_memory_bytes"] == 2**60
    for name in ("steps", "tokens", "parameters", "trained_parameters", "loss", "evaluation", "result"):
        assert told[name] == uninterrupted[name]


def test_what_was_interrupted_after_training_is_summed_up_the_next_time(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = tiny_world.recipe(run)
    assert danlu("train", recipe) == 0
    before = summary_of(run)
    assert before["evaluation"] is None
    capsys.readouterr()
    assert danlu("train", recipe) == 0
    assert capsys.readouterr().err.startswith("was finished already, after step 12")
    (run / "summary.json").unlink()
    assert danlu("train", recipe) == 0
    assert "was finished already" not in capsys.readouterr().err
    again = summary_of(run)
    of_this_process = {"peak_memory_bytes", "memory", "plan"}
    assert before.keys() == again.keys()
    assert {name: again[name] for name in again.keys() - of_this_process} == {
        name: before[name] for name in before.keys() - of_this_process
    }


def test_going_back_takes_the_summary_away(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    recipe = tiny_world.recipe(run)
    assert danlu("train", recipe) == 0
    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate", stopped_at(10))
        assert danlu("train", recipe, "--resume", run / "checkpoints" / "step-00000008") == 130
    assert not (run / "summary.json").exists()


def test_seconds() -> None:
    step, evaluation = {"step": 1, "elapsed_s": 2.0}, {"step": 1, "eval_loss": 1.0, "eval_s": 0.5}
    assert seconds_in([]) == 0
    assert seconds_in([step, evaluation, {"step": 1, "event": "sample"}]) == 2.5
    assert seconds_in([step, evaluation, {"step": 2, "elapsed_s": 4.0}]) == 4.0  # the clock ran through it


def test_frozen_and_packed_weights(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, steps=2)
    loop.fit(run)
    model = run.learner.model
    every = sum(parameter.numel() for parameter in model.parameters())
    model.embed_tokens.weight.requires_grad_(False)
    linear = model.layers["0"].mlp.up_proj

    class Packed(nn.Module):
        shape = linear.shape

    linear.weight, linear.quantized = None, Packed()
    result = tmp_path / "result"
    result.mkdir()
    (result / "one.safetensors").write_bytes(b"12345")
    (result / "two.safetensors").write_bytes(b"678")
    (result / "config.json").write_bytes(b"not a weight")
    told = json.loads(summed_up(run, result).read_text())
    assert told["parameters"] == every
    packed = linear.shape[0] * linear.shape[1]
    assert told["trained_parameters"] == every - model.embed_tokens.weight.numel() - packed
    assert told["result"] == {"path": "result", "bytes": 8}


def test_without_metrics_and_without_a_place(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, steps=2)
    loop.fit(run)
    run.metrics.truncate(0)
    told = json.loads(summed_up(run, tmp_path).read_text())
    assert (told["loss"], told["tokens_per_second"], told["evaluation"], told["seconds"]) == (None, None, None, 0)
    assert told["steps"] == 2 and told["tokens"] == run.state.tokens > 0
    run.metrics.evaluation(2, {"loss": float("nan"), "s": 1.0})
    assert json.loads(summed_up(run, tmp_path).read_text())["evaluation"] == {"last": "nan", "best": "nan"}
    run.metrics.evaluation(2, {"loss": 3.0, "s": 1.0})
    assert json.loads(summed_up(run, tmp_path).read_text())["evaluation"] == {"last": 3.0, "best": 3.0}
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(ResourceError, match=r"summary.json: cannot be written: Is a directory"):
        summed_up(run, tmp_path)


def test_a_tied_matrix_counts_once(tmp_path: Path) -> None:
    tied = tiny_run(tmp_path / "tied", tie_word_embeddings=True).learner.model
    apart = tiny_run(tmp_path / "apart").learner.model
    assert parameters_of(apart) - parameters_of(tied) == torch.numel(apart.embed_tokens.weight)
