"""`danlu train` from a recipe to a model folder: every way of training falls in loss, and says what it did."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.inline_workers import InlineWorkers
from builders.tiny_world import CONFIG, World, danlu, events, last_state, metrics, spike_at
from safetensors.torch import load_file

from danlu.models.hf_folder import read_config
from danlu.models.loading import load
from danlu.numerics.loss_scaling import LossScaler
from danlu.optim.build import Optimizers
from danlu.run import auto_values, train
from danlu.stages import reader
from danlu.stages.table import STAGES
from danlu.training import loop, progress, recorders, trackers
from danlu.training.checkpoints import loading
from danlu.training.checkpoints.folders import remove_checkpoint
from danlu.training.checkpoints.loading import read_group
from danlu.training.checkpoints.verification import verify

pytestmark = pytest.mark.usefixtures("tokenising_here")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def rates(folder: Path) -> list[float]:
    return [line["learning_rate"] for line in metrics(folder) if "loss" in line]


def fell(folder: Path) -> bool:
    seen = losses(folder)
    return sum(seen[-3:]) / 3 < sum(seen[:3]) / 3 - 0.3


# -- what a run leaves, and says --------------------------------------------------------------------------------------


def test_the_run_folder_and_what_a_new_user_reads(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    prompt = "What colour is the fox?"
    changes = {
        "data": {"eval": 10},
        "evaluation": {"every": 6, "samples": {"prompts": [prompt], "max_new_tokens": 4}},
        "log": {"tensorboard": True},
    }
    assert danlu("train", tiny_world.recipe(output, **changes)) == 0
    out, said = capsys.readouterr()
    assert out == ""
    lines = [line for line in said.splitlines() if not line.startswith("precision: ")]  # said on some machines
    sampled = [line for line in metrics(output) if line.get("event") == "sample"]
    scores = [line for line in metrics(output) if "eval_loss" in line]
    first, last = metrics(output)[0], [line for line in metrics(output) if "loss" in line][-1]
    rows = sum(1 for _ in tiny_world.chat.open())
    assert lines[0].startswith(f"data: {rows} rows, ") and lines[0].endswith(" of them trained")
    assert " rows are longer than data.max_length: " in lines[1] and lines[1].endswith(" tokens are left out")
    cut = "data: 18 of 100 samples train an answer that is cut before its end, and nothing of when to stop: raise "
    assert lines.pop(2).startswith(cut)
    assert lines[2] == "evaluation data: 10 samples of these rows are held out"
    assert lines[3].startswith("mfu: divided by the measured peak, ")
    summary = json.loads((output / "summary.json").read_text())
    assert summary["peak"]["measured_flops"] > 0 and summary["peak"]["mfu_divides_by"] == "measured_flops x processes"
    assert (
        lines[4]
        == "llama with 44,192 parameters, all trained, on cpu, fp32; 12 steps of 4 x 64 tokens (micro-batches of 2)"
    )
    assert lines.pop(5).startswith(
        "only 12 optimizer steps of 4 x 64 tokens: little is learnt in so few. Raise epochs "
    )
    assert lines[5].startswith(
        "memory expected: weights 173 KiB + gradients 173 KiB + optimizer 345 KiB + activations "
    )
    assert lines[6].startswith(f"step 1/12 loss {first['loss']:.3f} grad ")
    assert f"step 12/12 loss {last['loss']:.3f} grad " in said
    assert f"step 6 sample: {prompt}\n  -> " in said
    assert f"step 6 evaluation: loss {scores[0]['eval_loss']:.3f}, perplexity " in said
    assert lines[-3] == f"finished after step 12: {output}"
    assert lines[-1] == f"  curves and samples of the run: `danlu report {output}`"
    console, shown = (re.sub(" eta .*", "", text) for text in ((output / "logs" / "console.txt").read_text(), said))
    assert console.startswith("--- 20") and console.splitlines()[1:] == shown.splitlines()[:-2]
    assert [sample["prompt"] for sample in sampled] == [prompt, prompt]
    assert {entry.name for entry in output.iterdir()} == {
        ".lock", "recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "tensorboard",
        "checkpoints", "model", "logs", "plan.json",
    }  # fmt: skip
    assert {entry.name for entry in (output / "model").iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
    }  # fmt: skip
    _tensorboard_agrees(output)


def _tensorboard_agrees(output: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(output / "tensorboard"))
    board.Reload()
    by_step = {line["step"]: line for line in metrics(output) if "loss" in line}
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "accuracy"):
        points = board.Scalars(f"train/{name}")
        assert [point.step for point in points] == sorted(by_step)
        assert [point.value for point in points] == pytest.approx([by_step[p.step][name] for p in points], rel=1e-6)
    judged = {line["step"]: line for line in metrics(output) if "eval_loss" in line}
    assert {point.step: point.value for point in board.Scalars("eval/loss")} == pytest.approx(
        {step: line["eval_loss"] for step, line in judged.items()}, rel=1e-6
    )
    assert "sample/text_summary" in board.Tags()["tensors"]


@pytest.mark.parametrize("streaming", [False, True])
def test_samples_beyond_the_models_positions_are_told_before_training(
    tiny_world: World, tmp_path: Path, streaming: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"steps": 1, "batch": {"sequences": 1, "micro": 1}, "schedule": "constant"}
    for positions, told in ((32, True), (64, False)):
        model = {"config": {**CONFIG, "max_position_embeddings": positions}}
        data = {"streaming": streaming}
        assert danlu("train", tiny_world.recipe(tmp_path / f"{positions}", model=model, data=data, **changes)) == 0
        said = capsys.readouterr().err
        limit = "data.max_length: 64 is more than the 32 positions that the model has for a sample"
        assert (limit in said) == told
        assert ("samples are longer, up to 64 tokens. What lies beyond" in said) == (told and not streaming)


def test_an_epoch_trains_on_every_token_once(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"steps": None, "epochs": 2, "data": {"max_length": 256}, "batch": {"sequences": 3, "micro": 1}}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", **changes)) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("data: "))
    tokens = int(line.split(" rows, ")[1].split(" tokens")[0].replace(",", ""))
    assert sum(line["tokens"] for line in metrics(tmp_path / "run")) == 2 * tokens


def test_a_finished_run_is_a_model_to_start_from(tiny_world: World, tmp_path: Path) -> None:
    assert danlu("train", tiny_world.recipe(tmp_path / "first", steps=30)) == 0
    again = tiny_world.recipe(
        tmp_path / "second", model={"path": str(tmp_path / "first"), "config": None, "tokenizer": None}
    )
    assert danlu("train", again) == 0
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0] - 1
    assert read_config(tmp_path / "second" / "model") == read_config(tmp_path / "first" / "model")


@pytest.mark.slow
def test_a_tokenizer_that_is_only_a_tokenizer_model_is_exported_for_other_tools(
    shared_data: Path, tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads such a file by itself, but to other ids than those that were trained."""
    from transformers import AutoTokenizer

    monkeypatch.setattr("danlu.data.tokenizer_folder.CONVERTED", str(tmp_path / "converted"))
    source = shared_data / "tokenizers" / "llama2-sp"
    model = {"tokenizer": str(source), "config": {**CONFIG, "hidden_size": 8, "num_hidden_layers": 1}}
    data = {"train": str(tiny_world.text), "cache": str(tmp_path / "cache")}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", stage="pretrain", model=model, data=data, steps=2)) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert exported("Hello  world").input_ids == [1, 15043, 29871, 3186], "as sentencepiece has it"
    assert AutoTokenizer.from_pretrained(source)("Hello  world").input_ids != [1, 15043, 29871, 3186]


@pytest.mark.slow
def test_a_tokenizer_of_another_family_is_exported_so_that_it_is_read_as_it_was(
    shared_data: Path, tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's files beside a Mistral: transformers chooses a class by the model's type; it reads no vocab.json."""
    from transformers import AutoTokenizer

    monkeypatch.setattr("danlu.data.tokenizer_folder.CONVERTED", str(tmp_path / "converted"))
    monkeypatch.setattr("danlu.data.tokenizer_export.WorkerPool", InlineWorkers)
    source = shared_data / "tokenizers" / "gpt2"
    model = {"tokenizer": str(source), "config": {**CONFIG, "model_type": "mistral", "hidden_size": 8}}
    data = {"train": str(tiny_world.text), "cache": str(tmp_path / "cache")}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", stage="pretrain", model=model, data=data, steps=2)) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    text = "Hello  world<|endoftext|>"
    assert exported(text).input_ids == AutoTokenizer.from_pretrained(source)(text).input_ids


# -- ways to train ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_trains_and_exports(tiny_world: World, tmp_path: Path, precision: str) -> None:
    output = tmp_path / "run"
    assert danlu("train", tiny_world.recipe(output, precision=precision)) == 0
    assert fell(output)
    assert ("loss_scale" in metrics(output)[0]) == (precision == "fp16")
    saved = read_group(last_state(output)[0], "model")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    exported = load_file(output / "model" / "model.safetensors")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {tensor.dtype for tensor in exported.values()} == {dtype}
    for name, parameter in load(output / "model").named_parameters():
        torch.testing.assert_close(parameter, saved[name].to(dtype).float(), rtol=0, atol=0)


SPEEDS = {"fp32": 163e9, "bf16": 122e9, "fp16": 2e9}


def measured(monkeypatch: pytest.MonkeyPatch, **speeds: float) -> list[str | None]:
    """Speeds that a machine seems to have; gives what was asked for."""
    asked: list[str | None] = []

    def speeds_of(device: Any, also: str | None = None) -> dict[str, float]:
        asked.append(also)
        return SPEEDS | speeds

    for module in (train, auto_values):
        monkeypatch.setattr(module, "product_speeds", speeds_of)
    return asked


def test_precision_auto_is_measured_once_and_kept_in_the_run(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measured(monkeypatch)
    recipe = tiny_world.recipe(tmp_path / "run", precision="auto", steps=2)
    assert danlu("train", recipe) == 0
    said = capsys.readouterr().err
    speeds = "matrix products of 163 GFLOP/s with fp32, 122 with bf16"
    assert f"precision: auto takes fp32 on this machine: {speeds}" in said
    assert "parameters, all trained, on cpu, fp32; 2 steps" in said
    assert "precision: fp32\n" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert asked[0] is None
    # On a machine that would choose otherwise the run goes on as it began, and is the same run.
    shutil.rmtree(tmp_path / "run" / "model")
    asked = measured(monkeypatch, bf16=1e12)
    assert danlu("train", recipe) == 0
    said = capsys.readouterr().err
    assert "precision: auto stays fp32, as when the run began" in said and "resuming" in said
    assert "changed since then" not in said
    assert "precision: fp32 is slower than bf16 on this machine" in said and asked == ["fp32"]
    assert danlu("train", recipe, "precision=bf16") == 5
    assert "precision: 'fp32' -> 'bf16'" in capsys.readouterr().err
    # A branch of it does too; a new run there is measured.
    branch = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert danlu("train", recipe, f"output={tmp_path / 'branch'}", "--resume", branch) == 0
    assert "precision: auto stays fp32" in capsys.readouterr().err
    assert danlu("train", recipe, f"output={tmp_path / 'new'}") == 0
    assert "precision: bf16\n" in (tmp_path / "new" / "recipe.yaml").read_text()


def test_a_precision_that_is_slower_here_is_told_before_training(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch)
    for precision in ("bf16", "fp32"):
        output = tmp_path / precision
        assert danlu("train", tiny_world.recipe(output, tmp_path / "r.yaml", precision=precision, steps=2)) == 0
        lines = capsys.readouterr().err.splitlines()
        told = [line for line in lines if line.startswith("precision: bf16 is slower than fp32 on this machine")]
        assert len(told) == (precision == "bf16")
        if told:
            assert lines.index(told[0]) < next(n for n, line in enumerate(lines) if line.startswith("step 1/2 "))


@pytest.mark.parametrize(
    ("optimizer", "schedule", "multiples"),
    [
        ({"kind": "adamw", "learning_rate": 1e-2}, {"kind": "cosine", "warmup": 0, "floor": 0.1}, (1, 0.1)),
        ({"kind": "sgd", "learning_rate": 1.0}, {"kind": "linear", "warmup": 2, "floor": 0.0}, (0.5, 0.0)),
        ({"kind": "adafactor", "learning_rate": 2e-2}, {"kind": "constant", "warmup": 4}, (0.25, 1)),
        ({"kind": "lion", "learning_rate": 3e-3}, {"kind": "wsd", "warmup": 2, "decay": 3, "floor": 0.5}, (0.5, 0.5)),
        (
            {"kind": "muon", "learning_rate": 2e-2, "adamw_learning_rate": 1e-2},
            {"kind": "inverse-sqrt", "warmup": 3},
            (1 / 3, 0.5),
        ),
    ],
)
def test_every_optimizer_and_schedule_trains(
    tiny_world: World,
    tmp_path: Path,
    optimizer: dict[str, Any],
    schedule: dict[str, Any],
    multiples: tuple[float, float],
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run")
    values = tiny_world.values(tmp_path / "run")
    recipe.write_text(json.dumps({**values, "optimizer": optimizer, "schedule": schedule}))
    assert danlu("train", recipe) == 0
    assert fell(tmp_path / "run")
    peak = optimizer["learning_rate"]
    assert (rates(tmp_path / "run")[0], rates(tmp_path / "run")[-1]) == pytest.approx(
        (peak * multiples[0], peak * multiples[1]), rel=1e-6, abs=1e-12
    )


@pytest.mark.parametrize("loss", [{"label_smoothing": 0.1}, {"z_loss": 0.5}, {"label_smoothing": 0.1, "z_loss": 0.5}])
def test_additions_to_the_loss_are_shown_beside_the_plain_one(
    tiny_world: World, tmp_path: Path, loss: dict[str, float]
) -> None:
    assert danlu("train", tiny_world.recipe(tmp_path / "run", loss=loss)) == 0
    lines = metrics(tmp_path / "run")
    assert fell(tmp_path / "run")
    assert abs(lines[-1]["loss"] - lines[-1]["nll"]) > 1e-3


def test_accumulation_equals_one_big_batch(tiny_world: World, tmp_path: Path) -> None:
    for name, change in (("parts", {"micro": 1}), ("whole", {"micro": 4}), ("half", {"sequences": 2, "micro": 2})):
        assert danlu("train", tiny_world.recipe(tmp_path / name, batch=change)) == 0
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert losses(tmp_path / "half") != pytest.approx(losses(tmp_path / "whole"), rel=1e-2)  # negative control


def test_micro_batches_fill_the_memory_that_is_given(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for number, memory in enumerate((0.003, 0.006, 0.1)):
        recipe = tiny_world.recipe(
            tmp_path / f"run{number}", batch={"sequences": 16, "micro": "auto", "memory": memory}
        )
        assert danlu("train", recipe, "steps=1", "schedule.warmup=0") == 0, capsys.readouterr().err
        found.append(last_state(tmp_path / f"run{number}")[2]["micro"])
    assert 1 <= found[0] < found[1] < found[2] == 16
    capsys.readouterr()
    recipe = tiny_world.recipe(tmp_path / "none", batch={"micro": "auto", "memory": 0.0001})
    assert danlu("train", recipe) == 2
    said = capsys.readouterr().err
    assert (
        "batch.memory: 0.0001 GiB do not hold one packed sequence: weights, gradients, optimizer and one of 64 tokens"
        in said
    )
    assert "Give more, or lower data.max_length." in said


def test_deterministic_holds_for_the_run_and_changes_no_bit_on_a_cpu(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = train.fit

    def fit(it: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        real(it)

    monkeypatch.setattr(train, "fit", fit)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # set by the run, and taken back by this test
    samples = {"every": 2, "samples": {"prompts": ["fox"], "max_new_tokens": 3, "temperature": 1.0}}
    for name, wanted in (("plain", False), ("same", True)):
        changes = {"steps": 2, "evaluation": samples, "deterministic": wanted}
        assert danlu("train", tiny_world.recipe(tmp_path / name, **changes)) == 0
    assert seen == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "same")]
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 5
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_best_checkpoint_is_what_is_exported(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    changes = {
        "data": {"eval": 10},
        "ema": 0.5,
        "evaluation": {"every": 3},
        "checkpoint": {"every": 6, "keep": 1, "keep_best": True},
    }
    real = loop.evaluate

    def worse_after_step_3(*arguments: Any, **options: Any) -> Any:  # which no ordinary checkpoint is of
        scores = real(*arguments, **options)
        calls.append(scores)
        return scores if len(calls) < 2 else type(scores)(**{**vars(scores), "loss": scores.loss + 10})

    calls: list[Any] = []
    monkeypatch.setattr(loop, "evaluate", worse_after_step_3)
    assert danlu("train", tiny_world.recipe(output, **changes)) == 0
    said = capsys.readouterr().err
    assert f"exporting step 3, which had the lowest evaluation loss ({calls[0].loss:.4f})" in said
    assert sorted(entry.name for entry in (output / "checkpoints").iterdir()) == ["step-00000003", "step-00000012"]
    best, last = (output / "checkpoints" / f"step-{step:08d}" for step in (3, 12))
    for folder, group in (("model", "model"), ("model-ema", "ema")):
        exported = dict(load(output / folder).named_parameters())
        kept, ended = read_group(best, group), read_group(last, group)
        assert all(torch.equal(exported[name], kept[name]) for name in kept)
        assert not torch.equal(exported["norm.weight"], ended["norm.weight"])


def test_an_average_and_what_it_is_judged_by(tiny_world: World, tmp_path: Path) -> None:
    changes = {"data": {"eval": 10}, "evaluation": {"every": 12}}
    assert danlu("train", tiny_world.recipe(tmp_path / "plain", **changes)) == 0
    assert danlu("train", tiny_world.recipe(tmp_path / "averaged", ema=0.9, **changes)) == 0
    assert losses(tmp_path / "plain") == losses(tmp_path / "averaged")  # it does not take part in training
    plain, averaged = (
        [line["eval_loss"] for line in metrics(tmp_path / name) if "eval_loss" in line]
        for name in ("plain", "averaged")
    )
    assert plain != averaged
    assert (tmp_path / "averaged" / "model-ema" / "config.json").is_file()


# -- when training goes wrong -----------------------------------------------------------------------------------------


def test_an_fp16_overflow_is_survived_and_shown(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = loop.accumulate

    def overflow_in_step_3(compute: Any, *arguments: Any, step: int, **options: Any) -> Any:
        gradients = real(compute, *arguments, step=step, **options)
        if step == 3:
            compute.model.norm.weight.grad[0] = math.inf
            return type(gradients)(**{**vars(gradients), "norm": math.inf})
        return gradients

    monkeypatch.setattr(loop, "accumulate", overflow_in_step_3)
    monkeypatch.setattr(train, "_scaler", lambda tokens: LossScaler(scale=64.0))
    assert danlu("train", tiny_world.recipe(tmp_path / "run", precision="fp16")) == 0
    assert events(tmp_path / "run") == [{"step": 3, "event": "overflow", "before": 64.0, "after": 32.0}]
    assert "step 3: fp16 overflow, update skipped, loss scale 64 -> 32\n" in capsys.readouterr().err
    assert metrics(tmp_path / "run")[3]["grad_norm"] == "inf"
    assert fell(tmp_path / "run")


def test_fp16_begins_at_a_scale_that_holds(tiny_world: World, tmp_path: Path) -> None:
    """The loss of a step is a sum: at the usual 65,536 the first updates would be lost, more in larger steps."""
    for sequences in (4, 64):
        output = tmp_path / f"run{sequences}"
        recipe = tiny_world.recipe(output, precision="fp16", batch={"sequences": sequences, "micro": 4}, steps=2)
        assert danlu("train", recipe) == 0
        assert events(output) == []


@pytest.fixture
def diverging(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A recipe whose weights are multiplied by a huge number in step 7."""

    def recipe(**changes: Any) -> Path:
        real = loop.accumulate

        def spoilt(compute: Any, *arguments: Any, step: int, **options: Any) -> Any:
            if step == 7:
                with torch.no_grad():
                    compute.model.layers["1"].mlp.up_proj.weight[3, 2] = math.nan
            return real(compute, *arguments, step=step, **options)

        monkeypatch.setattr(loop, "accumulate", spoilt)
        return tiny_world.recipe(tmp_path / "run", **changes)

    return recipe


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_weight(
    diverging: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert danlu("train", diverging(checkpoint={"every": 3, "keep": 3})) == 7
    said = capsys.readouterr().err
    assert "error: step 7: the loss is not finite because a weight is not: layers.1.mlp.up_proj.weight." in said
    assert "go back to an earlier checkpoint with a lower optimizer.learning_rate" in said
    steps = [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert steps[:2] == ["step-00000003", "step-00000006"]
    for step in steps[:2]:
        assert verify(tmp_path / "run" / "checkpoints" / step) == []
        assert all(
            tensor.isfinite().all() for tensor in read_group(tmp_path / "run" / "checkpoints" / step, "model").values()
        )
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("every", [2, 3])  # found when step 4 is saved, or in the loss of step 5
def test_weights_that_are_not_finite_take_no_place_of_good_ones(
    tiny_world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    every: int,
) -> None:
    real = Optimizers.step
    calls = [0]

    def spoil_the_fourth(optimizer: Optimizers, **options: Any) -> None:
        real(optimizer, **options)
        calls[0] += 1
        if calls[0] == 4:
            with torch.no_grad():
                optimizer.parameters["norm.weight"][0] = math.inf

    monkeypatch.setattr(Optimizers, "step", spoil_the_fourth)
    assert danlu("train", tiny_world.recipe(tmp_path / "run", checkpoint={"every": every, "keep": 1})) == 7
    said = capsys.readouterr().err
    if every == 2:
        assert "error: step 4: its update made weights that are not finite: norm.weight. They are not saved" in said
    else:
        assert "error: step 5: the loss is not finite because a weight is not: norm.weight." in said
    path, _, _ = last_state(tmp_path / "run")
    assert path.name == f"step-0000000{every}" and verify(path) == []
    assert all(tensor.isfinite().all() for tensor in read_group(path, "model").values())


def test_a_learning_rate_that_is_far_too_high(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"optimizer": {"learning_rate": 1e30}, "gradient_clipping": None, "watch": {"loss_spike": None}}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", **changes)) == 7
    said = capsys.readouterr().err
    assert "error: step 2: the loss is not finite, first in the output of layers.0.attention" in said
    assert ", for chat.jsonl:" in said and "lower optimizer.learning_rate" in said


@pytest.mark.parametrize("policy", ["warn", "skip", "rewind"])
def test_what_the_watch_does_about_a_spike(
    tiny_world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    output = tmp_path / "run"
    spike_at(monkeypatch, 4, 7)
    watch = {"policy": policy, "gradient_norm": 100.0, "loss_spike": None, "rewinds": 1}
    code = danlu("train", tiny_world.recipe(output, watch=watch, checkpoint={"every": 2}))
    said = capsys.readouterr().err
    assert [event["step"] for event in events(output, "spike")] == [4, 7]
    assert "step 4: spike: gradient norm " in said
    assert f"is above watch.gradient_norm 100; watch.policy: {policy}\n" in said
    if policy == "rewind":
        assert code == 7
        assert "step 4: back to the checkpoint of step 2; packed sequences skipped so far: 4\n" in said
        assert "error: step 7: a spike after going back 1 times (watch.rewinds)." in said
        assert last_state(output)[2]["run"]["step"] == 6
        return
    assert code == 0
    assert len(losses(output)) == 12
    updates = read_group(last_state(output)[0], "optimizer")["step.norm.weight"]
    assert updates.item() == (12 if policy == "warn" else 10)


def test_missing_wandb_is_said_before_anything_expensive(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    monkeypatch.setattr(reader, "prepare", lambda *arguments, **options: pytest.fail("the data was read"))
    assert danlu("train", tiny_world.recipe(tmp_path / "run", log={"wandb": "project"})) == 2
    assert "log.wandb: the wandb package is not installed. Run `pip install wandb`" in capsys.readouterr().err


def test_wandb_without_a_login_is_said_before_the_data_is_read(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    monkeypatch.setattr(reader, "prepare", lambda *arguments, **options: pytest.fail("the data was read"))
    assert danlu("train", tiny_world.recipe(tmp_path / "run", log={"wandb": "project"})) == 6
    assert " log.wandb: W&B does not let the run begin: api_key not configured" in capsys.readouterr().err


def test_a_recorder_that_fails_later_is_said_once_and_the_run_goes_on(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them: W&B and TensorBoard, the progress of steps, remarks on them."""
    finished: list[bool] = []

    def fail_from_step_3(metrics: Any, *rest: Any) -> None:
        if metrics.step >= 3:
            raise ConnectionError("gone")

    def log(values: Any, step: int) -> None:
        if step >= 3:
            raise ConnectionError("no network")

    wandb = SimpleNamespace(log=log, finish=lambda: finished.append(True))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: wandb, __spec__=object()))
    for recorder in (trackers.TensorBoard, progress.LineProgress, recorders.Remarks):
        monkeypatch.setattr(recorder, "step", lambda self, metrics: fail_from_step_3(metrics))
    with_remarks = replace(STAGES["sft"], remarks=lambda recipe: lambda metrics: ())
    monkeypatch.setitem(STAGES, "sft", with_remarks)
    changes = {"steps": 6, "log": {"wandb": "project", "tensorboard": True}}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", **changes)) == 0
    said = capsys.readouterr().err
    for name in ("log.wandb", "log.tensorboard", "the progress of steps", "logs/console.txt", "remarks on steps"):
        assert said.count(f"{name}: switched off for the rest of this run (ConnectionError: ") == 1
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6] and finished == [True]


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_trains_the_same_without_compiling_again(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    changes = {
        "steps": 20,
        "data": {"eval": 10},
        "evaluation": {"every": 5},
        "model": {"config": {**CONFIG, "num_hidden_layers": 10, "sliding_window": 16, "model_type": "mistral"}},
    }
    assert danlu("train", tiny_world.recipe(tmp_path / "eager", **changes)) == 0
    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []
    real = loop.accumulate

    def counting(*arguments: Any, **options: Any) -> Any:
        gradients = real(*arguments, **options)
        graphs.append(counters["stats"]["unique_graphs"])
        return gradients

    monkeypatch.setattr(loop, "accumulate", counting)
    # Layers that differ in a number would be compiled one by one, until torch gives up on them without a word.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert danlu("train", tiny_world.recipe(tmp_path / "compiled", compile=True, **changes)) == 0
    tokens = {line["tokens"] for line in metrics(tmp_path / "compiled") if "loss" in line}
    assert len(tokens) > 5  # steps of many sizes, so a length that was made a constant would show
    assert 0 < graphs[0] < 10
    assert graphs[:5] == [graphs[0]] * 5
    assert graphs[5:] == [2 * graphs[0]] * 15  # the first evaluation compiles the same without gradients
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
    assert losses(tmp_path / "compiled") != losses(tmp_path / "eager")  # it was compiled


# -- a checkpoint as a model ------------------------------------------------------------------------------------------


def test_checkpoints_can_be_exported(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    assert danlu("train", tiny_world.recipe(output, precision="bf16", ema=0.5)) == 0
    for source, target, options in (
        (output, "newest", ()),
        (output, "average", ("--average",)),
        (output / "checkpoints" / "step-00000008", "earlier", ()),
    ):
        assert danlu("checkpoint", "export", source, tmp_path / target, *options) == 0
    assert "step-00000008 written: try `danlu generate" in capsys.readouterr().out
    files = {path.name for path in (output / "model").iterdir()}
    for one, other in (("model", "newest"), ("model-ema", "average")):
        assert {path.name for path in (tmp_path / other).iterdir()} == files
        for name in files:
            assert (output / one / name).read_bytes() == (tmp_path / other / name).read_bytes(), name
    saved = read_group(output / "checkpoints" / "step-00000008", "model")
    written = load(tmp_path / "earlier", dtype=torch.bfloat16)
    for name, parameter in written.named_parameters():
        assert torch.equal(parameter, saved[name].bfloat16())
    newest = load(tmp_path / "newest", dtype=torch.bfloat16).embed_tokens.weight
    assert not torch.equal(newest, written.embed_tokens.weight)  # what was compared does change from step to step


@pytest.mark.parametrize("moment", ["_intact_manifest", "_fill"])
def test_export_beside_a_run_that_prunes(
    tiny_world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """The checkpoint that was the newest is deleted, and another is there, just before it is proved or read."""
    output = tmp_path / "run"
    assert danlu("train", tiny_world.recipe(output, checkpoint={"every": 4, "keep": 3})) == 0
    newest, named = (output / "checkpoints" / f"step-000000{step}" for step in ("12", "08"))
    shutil.copytree(newest, tmp_path / newest.name)
    real = getattr(loading, moment)

    def pruning(path: Path, *arguments: Any) -> Any:
        if path.name == named.name and named.exists():
            remove_checkpoint(named)
            shutil.copytree(tmp_path / newest.name, newest, dirs_exist_ok=True)
        return real(path, *arguments)

    monkeypatch.setattr(loading, moment, pruning)
    remove_checkpoint(newest)
    shutil.copytree(named, tmp_path / "kept")
    capsys.readouterr()
    assert danlu("checkpoint", "export", output, tmp_path / "exported") == 0
    assert capsys.readouterr().out.startswith("step-00000012 written")
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == (
        output / "model" / "model.safetensors"
    ).read_bytes()
    shutil.copytree(tmp_path / "kept", named)
    assert danlu("checkpoint", "export", named, tmp_path / "again") == 5
    said = capsys.readouterr().err
    assert f"{named}: deleted while it was read" in said and "Export the run's folder instead" in said
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_exported_says_why(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert danlu("train", tiny_world.recipe(output, steps=3)) == 0

    def refused(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        return danlu("checkpoint", "export", *arguments), capsys.readouterr().err

    code, said = refused(output, output / "model")
    assert code == 6 and f"{output}/model: is there already. Choose an empty or new folder" in said
    code, said = refused(tmp_path, tmp_path / "new")
    assert code == 5 and f"{tmp_path}: neither a run with a checkpoint nor a checkpoint" in said
    code, said = refused(output, tmp_path / "new", "--average")
    assert code == 5 and "the run keeps no averaged weights" in said
    (output / "recipe.yaml").unlink()
    code, said = refused(output, tmp_path / "new")
    assert code == 5 and f"{output}/recipe.yaml: missing" in said
    assert not (tmp_path / "new").exists()


# -- a tokenizer that loses text --------------------------------------------------------------------------------------


def test_bytes_that_the_tokenizer_lacks_are_said(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lossy"
    shutil.copytree(tiny_world.tokenizer, folder)
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    unused = [token for token in ("ÿ", "þ", "À") if token in values["model"]["vocab"]]
    for token in unused:
        del values["model"]["vocab"][token]
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    model = {"config": CONFIG, "tokenizer": str(folder)}
    recipe = tiny_world.recipe(tmp_path / "run", steps=3, model=model)
    warning = f"it has no token for {len(unused)} of the 256 bytes"
    assert danlu("preview", recipe, "--html", tmp_path / "page.html") == 0
    assert warning in " ".join(capsys.readouterr().out.split())
    assert warning in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert danlu("train", recipe) == 0
    assert warning in capsys.readouterr().err
    assert unused
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", steps=3)) == 0
    assert "of the 256 bytes" not in capsys.readouterr().err
