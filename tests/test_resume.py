"""Interrupted and resumed equals uninterrupted, bit for bit: weights, optimizer, metrics, order of the data, export."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.stale_copies_worker import edit_json
from builders.tiny_world import CONFIG, World, danlu, differences, events, last_state, metrics, spike_at, write_rows

from danlu.core.run_files import RunLock
from danlu.data import tokenizer_folder
from danlu.data.demo_data import conversations
from danlu.data.tokenizer_training import CHATML
from danlu.numerics.loss_scaling import LossScaler
from danlu.planning import automatic_micro_batch
from danlu.run import train
from danlu.stages import reader
from danlu.training import loop

pytestmark = pytest.mark.usefixtures("tokenising_here")


class Killed(BaseException):
    """What a kill is to the process it ends: nothing below catches it, and nothing more is saved."""


Hook = Callable[[int], None]


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Hook], None]:
    """Calls a hook in the middle of a step, before its gradients are used; once."""

    def install(step: int, hook: Hook) -> None:
        real = loop.accumulate

        def accumulate(*arguments: Any, **options: Any) -> Any:
            if options["step"] == step:
                monkeypatch.setattr(loop, "accumulate", real)
                hook(step)
            return real(*arguments, **options)

        monkeypatch.setattr(loop, "accumulate", accumulate)

    return install


def kill(step: int) -> None:
    raise Killed


def send(number: signal.Signals) -> Hook:
    return lambda step: signal.raise_signal(number)


EVALUATED = {"data": {"eval": 10}, "evaluation": {"every": 3}}
PATIENCE = {"every": 3, "early_stop": {"patience": 3, "min_delta": 99.0}}  # the first evaluation stays the best

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "everything beside the weights": {
        **EVALUATED,
        "ema": 0.9,
        "precision": "bf16",
        "checkpoint": {"every": 4, "keep": 1, "keep_best": True},
    },
    "fp16 loss scaling": {"precision": "fp16", "gradient_clipping": None},
    "early stop": {**EVALUATED, "steps": 30, "evaluation": PATIENCE},
    "skipped updates": {
        "watch": {"policy": "skip", "gradient_norm": 100.0, "loss_spike": 0.5, "window": 6},
        "optimizer": {"kind": "lion", "learning_rate": 1e-3},
    },
    "going back after spikes": {  # from step 10 to 5, where the interrupted run has a checkpoint of 6 too
        "watch": {"policy": "rewind", "gradient_norm": 100.0, "loss_spike": None},
        "checkpoint": {"every": 5},
    },
    "moments in 8 bits": {"optimizer": {"kind": "adamw8bit", "smallest": 1, "learning_rate": 1e-2}},
    "weights for 3 bits": {
        "quantization": {"kind": "int3", "group": 16, "trained": True},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
    },
    "moments in bf16": {"optimizer": {"kind": "adamw", "moments": "bf16", "learning_rate": 1e-2}},
    "moments in a file": {"precision": "fp16", "optimizer": {"kind": "paged-adamw", "learning_rate": 1e-2}},
    "projected gradients": {
        "ema": 0.9,
        "optimizer": {"kind": "galore", "rank": 4, "update_every": 3, "states": "adamw8bit", "learning_rate": 1e-2},
    },
    "documents cut by packs": {
        "stage": "pretrain",
        "data": {"packing": "concatenate"},
        "optimizer": {"kind": "muon", "learning_rate": 1e-2},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_and_resumed_equals_uninterrupted(
    tiny_world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_step: Callable[[int, Hook], None],
    case: str,
) -> None:
    changes = dict(CASES[case])
    # Overflows in the first steps, and growth before and after each interruption.
    monkeypatch.setattr(train, "_scaler", lambda tokens: LossScaler(scale=2.0**16, growth_interval=2))
    if changes.get("stage") == "pretrain":
        changes["data"] = {**changes["data"], "train": str(tiny_world.text)}
    if "watch" in changes:
        spike_at(monkeypatch, *((10,) if case == "going back after spikes" else (2, 7, 10)))
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", **changes)) == 0

    recipe = tiny_world.recipe(tmp_path / "parts", **changes)
    in_step(6, send(signal.SIGTERM))  # 6 is evaluated, where anything is
    assert danlu("train", recipe) == 143
    assert last_state(tmp_path / "parts")[0].name == "step-00000006"
    in_step(8, kill)
    with pytest.raises(Killed):
        danlu("train", recipe)
    assert last_state(tmp_path / "parts")[0].name == "step-00000006"
    assert danlu("train", recipe) == 0
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    if case == "skipped updates":
        assert 3 <= len(events(tmp_path / "whole", "spike")) < 12
    if case == "going back after spikes":
        assert [event["back_to"] for event in events(tmp_path / "parts", "rewind")] == [5]
    if changes.get("precision") == "fp16":
        assert {event["event"] for event in events(tmp_path / "whole")} == {"overflow", "loss_scale"}
    if case == "early stop":
        assert last_state(tmp_path / "whole")[0].name == "step-00000012"


@pytest.mark.slow
def test_a_compiled_run_is_resumed_to_the_same_bits(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"compile": True, "precision": "bf16", "steps": 8, "checkpoint": {"every": 3}}
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", **changes)) == 0
    real, calls = loop.accumulate, []

    def cut_off(*arguments: Any, **options: Any) -> Any:
        calls.append(options["step"])
        if options["step"] == 5:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate", cut_off)
        assert danlu("train", tiny_world.recipe(tmp_path / "cut", **changes)) == 130
    assert calls == [1, 2, 3, 4, 5]
    assert last_state(tmp_path / "cut")[0].name == "step-00000003"
    torch.compiler.reset()  # as in a new process, which compiles anew
    assert danlu("train", tiny_world.recipe(tmp_path / "cut", **changes)) == 0
    assert differences(tmp_path / "whole", tmp_path / "cut") == []


@pytest.mark.parametrize("weights", [None, (1.0, 2.0)])
def test_a_stream_is_resumed_where_it_was(
    tiny_world: World,
    tmp_path: Path,
    in_step: Callable[[int, Hook], None],
    capsys: pytest.CaptureFixture[str],
    weights: tuple[float, float] | None,
) -> None:
    rows = tmp_path / "more.jsonl"
    write_rows(rows, list(conversations(1, 30)))
    sources = [{"path": str(path)} for path in (tiny_world.chat, rows)]
    if weights is not None:
        sources = [{**source, "weight": weight} for source, weight in zip(sources, weights, strict=True)]  # type: ignore[dict-item]
    changes = {"data": {"train": sources, "streaming": True, "shuffle_buffer": 25}}
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", **changes)) == 0
    recipe = tiny_world.recipe(tmp_path / "parts", **changes)
    in_step(5, send(signal.SIGINT))
    assert danlu("train", recipe) == 130
    in_step(10, kill)
    with pytest.raises(Killed):
        danlu("train", recipe)
    assert last_state(tmp_path / "parts")[0].name == "step-00000008"
    assert danlu("train", recipe) == 0
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    said = capsys.readouterr().err
    assert "data, as far as it was read: " in said
    assert " rows are longer than data.max_length: " in said


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_keeps_the_date_that_its_chat_template_writes(
    tiny_world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_step: Callable[[int, Hook], None],
    capsys: pytest.CaptureFixture[str],
    streaming: bool,
) -> None:
    """Begun on one day, resumed on another with its cache gone: the tokens are those of the day on which it began."""
    template = tmp_path / "dated.jinja"
    template.write_text("Today is {{ strftime_now('%d %B') }}.\n" + CHATML)
    model = {"tokenizer": str(tiny_world.tokenizer), "config": CONFIG, "chat_template": str(template)}

    def on(day: int, name: str) -> Path:
        monkeypatch.setattr(tokenizer_folder, "today", lambda: date(2026, 11, day))
        data = {"cache": str(tmp_path / "cache"), "train_on": "all", "streaming": streaming}
        return tiny_world.recipe(tmp_path / name, model=model, data=data, steps=6)

    assert danlu("train", on(22, "whole")) == 0
    assert "the chat template writes the date: 2026-11-22 (when the run began)" in capsys.readouterr().err
    in_step(4, send(signal.SIGTERM))
    assert danlu("train", on(22, "parts")) == 143
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    recipe = on(23, "parts")
    capsys.readouterr()
    assert danlu("train", recipe) == 0
    assert "the chat template writes the date: 2026-11-22 (when the run began)" in capsys.readouterr().err
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    assert danlu("train", on(23, "later")) == 0
    assert "model/model.safetensors" in differences(tmp_path / "whole", tmp_path / "later")
    assert danlu("train", recipe, "model.chat_template_date=2026-11-23") == 5
    assert "model.chat_template_date: '2026-11-22' -> '2026-11-23'" in capsys.readouterr().err


def test_another_seed_is_seen_everywhere(tiny_world: World, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        assert danlu("train", tiny_world.recipe(tmp_path / name, seed=seed, steps=2, ema=0.9)) == 0
    found = differences(tmp_path / "one", tmp_path / "other")
    for name in ("model.norm.weight", "optimizer.exp_avg.norm.weight", "ema.norm.weight", "state.feed"):
        assert name in found
    assert {"metrics.jsonl", "model/model.safetensors", "model-ema/model.safetensors"} <= set(found)
    assert "model/config.json" not in found
    assert metrics(tmp_path / "one") != metrics(tmp_path / "other")


# -- which run goes on, and which does not ----------------------------------------------------------------------------


@pytest.fixture
def stopped(tiny_world: World, tmp_path: Path, in_step: Callable[[int, Hook], None]) -> Path:
    """A run folder stopped after step 6 of 12, with a checkpoint of step 4 too."""
    in_step(6, send(signal.SIGINT))
    assert danlu("train", tiny_world.recipe(tmp_path / "run", data={"eval": 10})) == 130
    return tmp_path / "run"


def checkpoints(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ({"optimizer": {"learning_rate": 2e-2}}, ["optimizer.learning_rate: 0.01 -> 0.02"]),
        ({"seed": 1, "data": {"eval": 12}}, ["data.eval: 10 -> 12", "seed: 0 -> 1"]),
        ({"steps": 24}, ["steps: 12 -> 24"]),
        ({"steps": 8}, ["steps: 12 -> 8"]),
    ],
)
def test_a_change_that_matters_is_refused(
    tiny_world: World,
    stopped: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    listed: list[str],
) -> None:
    before = checkpoints(stopped)
    assert danlu("train", tiny_world.recipe(stopped, **{"data": {"eval": 10}, **changes})) == 5
    said = capsys.readouterr().err
    assert f"error: {stopped} holds a run of another recipe; what differs (there -> here):\n" in said
    assert said.split("here):\n")[1].split("To start again")[0] == "".join(f"  {line}\n" for line in listed)
    assert "To start again, add --overwrite, which keeps this run under another name, or choose another `out" in said
    of_length = {
        24: "This run was stopped after step 6, before its end: let it finish with its own recipe, and raise `steps`",
        8: "A finished run goes on when `steps` (or `epochs`, where it has those) is raised; to train its result",
    }
    given = [steps for steps, advice in of_length.items() if advice in said]
    assert given == ([changes["steps"]] if "steps" in changes else [])
    assert checkpoints(stopped) == before


def test_a_run_keeps_the_defaults_that_it_began_with(
    tiny_world: World, tmp_path: Path, in_step: Callable[[int, Hook], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its recipe says no rate, and had the one that all stages shared before they had rates of their own."""
    former = {"optimizer": {"learning_rate": 2e-4, "weight_decay": 0.1}, "schedule": {"warmup": 0.05}}
    silent = {"optimizer": {"kind": "adamw", "learning_rate": None}, "schedule": {"kind": "cosine", "warmup": None}}
    in_step(6, send(signal.SIGINT))
    assert danlu("train", tiny_world.recipe(tmp_path / "run", **former)) == 130
    capsys.readouterr()
    assert danlu("train", tiny_world.recipe(tmp_path / "run", **silent)) == 0
    said = capsys.readouterr().err
    kept = "schedule.warmup: 0.05, optimizer.weight_decay: 0.1, optimizer.learning_rate: 0.0002"
    assert f"{kept}: as when the run began, although the stage has other defaults now\n" in said
    assert metrics(tmp_path / "run")[0]["learning_rate"] == 2e-4

    in_step(6, send(signal.SIGINT))
    assert (
        danlu("train", tiny_world.recipe(tmp_path / "other", **{**former, "optimizer": {"learning_rate": 3e-3}})) == 130
    )
    assert danlu("train", tiny_world.recipe(tmp_path / "other", **silent)) == 5  # this rate was no default
    assert "optimizer.learning_rate: 0.003 -> 2e-05" in capsys.readouterr().err


def test_changes_that_do_not_matter_are_said_and_allowed(
    tiny_world: World, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = stopped.rename(stopped.with_name("moved"))
    changes = {
        "data": {"eval": 10, "workers": 2},
        "log": {"every": 3, "tensorboard": True},
        "checkpoint": {"every": 3, "keep": 1},
        "batch": {"micro": 4},
    }
    assert danlu("train", tiny_world.recipe(moved, **changes)) == 0
    said = capsys.readouterr().err
    assert f"resuming {moved} from step-00000006" in said
    for change in ("log.every: 1 -> 3", "checkpoint.keep: 2 -> 1", "batch.micro: 2 -> 4"):
        assert f"changed since then: {change}\n" in said
    assert "output:" not in said
    assert "(micro-batches of 4)" in said
    assert checkpoints(moved) == ["step-00000012"]
    assert [line["step"] for line in metrics(moved) if "loss" in line] == [1, 2, 3, 4, 5, 6, 9, 12]


def test_the_size_of_micro_batches_is_kept_when_it_was_found(
    tiny_world: World,
    tmp_path: Path,
    in_step: Callable[[int, Hook], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", batch={"micro": "auto"})
    monkeypatch.setattr(automatic_micro_batch, "MAX_CPU_TOKENS", 128)
    in_step(3, send(signal.SIGINT))
    assert danlu("train", recipe) == 130
    assert last_state(tmp_path / "run")[2]["micro"] == 2
    monkeypatch.setattr(automatic_micro_batch, "MAX_CPU_TOKENS", 256)  # as if more memory were free now
    assert danlu("train", recipe) == 0
    assert last_state(tmp_path / "run")[2]["micro"] == 2
    assert danlu("train", tiny_world.recipe(tmp_path / "new", batch={"micro": "auto"})) == 0
    assert last_state(tmp_path / "new")[2]["micro"] == 4


def test_never_does_not_touch_a_run(tiny_world: World, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_world.recipe(stopped, data={"eval": 10})
    assert danlu("train", recipe, "--resume", "never") == 5
    assert f"{stopped}: holds a run (step 6). Choose another `output`, or leave out" in capsys.readouterr().err
    fresh = tiny_world.recipe(stopped.with_name("fresh"), data={"eval": 10})
    assert danlu("train", fresh, "--resume", "never") == 0


def test_an_earlier_checkpoint_can_be_gone_back_to(
    tiny_world: World, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"data": {"eval": 10}}
    recipe = tiny_world.recipe(stopped, **changes)
    assert danlu("train", recipe, "--resume", stopped / "checkpoints" / "step-00000004") == 0
    said = capsys.readouterr().err
    assert f"resuming {stopped} from step-00000004" in said
    assert "deleted step-00000006: checkpoints after step-00000004" in said
    whole = stopped.with_name("whole")
    assert danlu("train", tiny_world.recipe(whole, **changes)) == 0
    assert differences(whole, stopped) == []


def test_a_run_can_branch_off_into_a_new_folder(
    tiny_world: World, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = stopped.with_name("branch")
    recipe = tiny_world.recipe(branch, data={"eval": 10})
    earlier = stopped / "checkpoints" / "step-00000006"
    assert danlu("train", recipe, "--resume", earlier) == 0
    assert checkpoints(stopped) == ["step-00000004", "step-00000006"]
    assert danlu("train", tiny_world.recipe(stopped, data={"eval": 10})) == 0
    assert differences(branch, stopped) == []
    capsys.readouterr()
    earlier = stopped / "checkpoints" / "step-00000012"
    assert danlu("train", recipe, "--resume", earlier) == 5
    said = capsys.readouterr().err
    assert f"{branch}: holds a run of its own (step 12), and {earlier} is of another. Choose a new `output`." in said


def test_a_machine_that_may_round_otherwise_is_said(
    tiny_world: World, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stopped / "environment.json"
    environment = json.loads(file.read_text())
    environment["packages"]["torch"] = "1.0"
    file.write_text(json.dumps(environment))
    assert danlu("train", tiny_world.recipe(stopped, data={"eval": 10})) == 0
    said = capsys.readouterr().err
    assert "the last bits of numbers may differ from an uninterrupted run: packages.torch: '1.0' before, '" in said


@pytest.mark.parametrize("name", ["step-00000005", "recipe.yaml", "."])
def test_a_checkpoint_that_is_none(
    tiny_world: World, stopped: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    given = stopped / "checkpoints" / name
    assert danlu("train", tiny_world.recipe(stopped, data={"eval": 10}), "--resume", given) == 5
    said = capsys.readouterr().err
    assert f"{given}: no checkpoint. --resume takes auto, never, or a folder such as" in said.replace("/.:", "/.:")
    assert f"{stopped}/checkpoints/step-00000100." in said


def test_a_finished_run_says_so_and_stays_as_it_is(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=3)
    assert danlu("train", recipe) == 0
    weights = tmp_path / "run" / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    capsys.readouterr()
    monkeypatch.setattr(reader, "prepare", lambda *arguments, **options: pytest.fail("the data was read again"))
    assert danlu("train", recipe) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"was finished already, after step 3: {tmp_path}/run\n")
    assert f"danlu chat {tmp_path}/run/model" in said
    assert weights.stat().st_mtime_ns == written
    assert danlu("train", recipe, "steps=2") == 5
    assert "steps: 3 -> 2" in capsys.readouterr().err


@pytest.mark.parametrize(("length", "less", "more"), [("steps", 4, 8), ("epochs", 0.2, 0.5)])
def test_a_finished_run_goes_on_when_more_is_asked_for(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: str, less: float, more: float
) -> None:
    """With a schedule that has no end it has the bits of a run that was as long from its beginning."""
    changes: dict[str, Any] = {"steps": None, "schedule": {"kind": "constant"}, "checkpoint": {"every": 2, "keep": 9}}
    small = {"batch": {"sequences": 2, "micro": 2}}
    recipe = tiny_world.recipe(tmp_path / "run", **changes, **small)
    assert danlu("train", recipe, f"{length}={less}") == 0
    step = last_state(tmp_path / "run")[2]["run"]["step"]
    result = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert danlu("train", recipe, f"{length}={more}") == 0
    said, total = capsys.readouterr().err, last_state(tmp_path / "run")[2]["run"]["step"]
    assert f"changed since then: {length}: {less} -> {more}" in said and total > step
    assert f"the run had ended after step {step} and goes on to step {total}, with the schedule of all these\n" in said
    whole = tiny_world.recipe(tmp_path / "whole", **changes, **small)
    assert danlu("train", whole, f"{length}={more}") == 0
    assert differences(tmp_path / "run", tmp_path / "whole") == []
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() != result
    assert danlu("train", recipe, f"{length}={more}") == 0
    assert f"was finished already, after step {total}" in capsys.readouterr().err


def test_a_schedule_that_had_ended_rises_again_and_says_so(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=4)
    assert danlu("train", recipe) == 0
    assert danlu("train", recipe, "steps=8") == 0
    said = capsys.readouterr().err.replace("\n  ", " ")
    assert "goes on to step 8, with the schedule of all these: the learning rate goes on at 0." in said
    assert "of its peak, and had ended at 0.1\n" in said


def test_a_run_that_early_stop_has_ended_is_not_prolonged(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = {"data": {"eval": 5}, "evaluation": {"every": 2, "early_stop": {"patience": 1, "min_delta": 9.0}}}
    recipe = tiny_world.recipe(tmp_path / "run", **stopping)
    assert danlu("train", recipe) == 0
    said, state = capsys.readouterr().err, last_state(tmp_path / "run")[2]["run"]
    lowest = f"the lowest evaluation loss ({state['best_value']:.4f}) was before it. checkpoint.keep_best: true keeps"
    assert f"early stop: exporting step {state['step']}, the last one; {lowest}" in said.replace("\n  ", " ")
    best = ["checkpoint.keep_best=true", f"output={tmp_path / 'best'}"]
    assert danlu("train", recipe, *best) == 0  # control
    assert "the last one" not in capsys.readouterr().err
    assert danlu("train", recipe, "steps=24") == 5
    said = capsys.readouterr().err
    assert "steps: 12 -> 24" in said and "Early stop has ended this run, and such a run is not prolonged" in said


def test_overwrite_keeps_the_earlier_run_under_another_name(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = tiny_world.recipe(run, steps=2)
    assert danlu("train", recipe, "--overwrite") == 0
    assert "--overwrite" not in capsys.readouterr().err  # there was nothing to keep
    first = (run / "model" / "model.safetensors").read_bytes()
    for number in (1, 2):
        assert danlu("train", recipe, "--overwrite", f"seed={number}") == 0
        assert f"--overwrite: the earlier run is in {run}.{number} now\n" in capsys.readouterr().err
    assert (tmp_path / "run.1" / "model" / "model.safetensors").read_bytes() == first
    assert (run / "model" / "model.safetensors").read_bytes() != first
    assert len(metrics(run)) == 2
    with RunLock(run):
        assert danlu("train", recipe, "--overwrite") == 6
        assert "is using this run folder" in capsys.readouterr().err
    for flags, message in (
        (("--resume", "never"), "--overwrite starts again, and --resume never says from where to go on: leave one out"),
        (("--dry-run",), "--overwrite: a dry run keeps nothing and moves nothing."),
        ((f"model={run}/model",), f"model.path ({run}/model) lies in the output folder"),
    ):
        assert danlu("train", recipe, "--overwrite", *flags) != 0
        assert message in capsys.readouterr().err.replace("\n  ", " ")
    foreign = tmp_path / "foreign"
    (foreign / "model").mkdir(parents=True)
    assert danlu("train", recipe, "--overwrite", f"output={foreign}") == 6
    assert "no run of danlu has written this folder, so --overwrite does not move it" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("run*") if path.is_dir()) == ["run", "run.1", "run.2"]


def test_the_resolved_recipe_trains_the_same_again(tiny_world: World, tmp_path: Path) -> None:
    changes = {"data": {"eval": 0.1}, "batch": {"micro": "auto"}, "ema": 0.9, "steps": None, "epochs": 0.2}
    assert danlu("train", tiny_world.recipe(tmp_path / "one", **changes)) == 0
    again = tmp_path / "one" / "recipe.yaml"
    assert danlu("train", again, f"output={tmp_path / 'again'}") == 0
    assert differences(tmp_path / "one", tmp_path / "again") == []


# -- folders that are not this run's ----------------------------------------------------------------------------------


def test_an_output_folder_with_other_things_is_refused_and_left_alone(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    for name in ("photo.jpg", "thesis.tex", "a", "b", "c", "d"):
        (output / name).write_text("mine")
    assert danlu("train", tiny_world.recipe(output)) == 6
    said = capsys.readouterr().err
    assert f"{output}: the output folder holds other things (a, b, c, d, photo.jpg and 1 more)." in said
    assert "Choose an empty or new `output`." in said
    assert len(list(output.iterdir())) == 6


def test_a_model_without_checkpoints_is_not_replaced(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=2)
    assert danlu("train", recipe) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert danlu("train", recipe) == 6
    assert "holds a trained model but no checkpoint to go on from" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_what_a_kill_leaves_before_the_first_checkpoint_is_no_stranger(tiny_world: World, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (output / "checkpoints" / ".step-00000004.99999999.tmp").mkdir(parents=True)
    for name in ("recipe.yaml.tmp", ".environment.json.danlu-99999999.tmp", ".lock"):
        (output / name).write_text("half")
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"st')
    assert danlu("train", tiny_world.recipe(output, steps=2)) == 0
    assert [line["step"] for line in metrics(output)] == [1, 2]
    assert checkpoints(output) == ["step-00000002"]


def test_the_data_may_not_change_behind_the_recipe(
    tiny_world: World, tmp_path: Path, in_step: Callable[[int, Hook], None], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", list(conversations(1, 40)))
    recipe = tiny_world.recipe(tmp_path / "run", data={"train": str(rows)})
    in_step(3, send(signal.SIGINT))
    assert danlu("train", recipe) == 130
    write_rows(rows, list(conversations(2, 40)))
    assert danlu("train", recipe) == 5
    assert "the training data is not what the checkpoint was made with" in capsys.readouterr().err
    rows.unlink()
    assert danlu("train", recipe, f"data.train={tiny_world.chat}") == 5
    said = capsys.readouterr().err
    assert "the recipe of the run there does not hold any more:" in said
    assert f"no file or folder '{rows}'" in said


def test_files_that_a_resumed_run_reads_again_may_not_change(
    tiny_world: World, tmp_path: Path, in_step: Callable[[int, Hook], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The base's config.json, the file of `model.config`, rows of a stream, rows of an evaluation."""
    base, config = tmp_path / "base", tmp_path / "config.json"
    shutil.copytree(tiny_world.base, base)
    config.write_text(json.dumps(CONFIG))
    rows = write_rows(tmp_path / "rows.jsonl", list(conversations(1, 40)))
    held_out = write_rows(tmp_path / "held_out.jsonl", list(conversations(2, 4)))
    for name, changes, file, edit, said in (
        (
            "base",
            {"model": {"path": str(base), "config": None}},
            base / "config.json",
            partial(edit_json, values={"rope_theta": 5e5}),
            f"model.path (config.json): {base}/config.json: rope_theta",
        ),
        (
            "config",
            {"model": {"config": str(config)}},
            config,
            partial(edit_json, values={"rms_norm_eps": 1e-3}),
            f"model.config: {config}: rms_norm_eps is new",
        ),
        (
            "stream",
            {"data": {"train": str(rows), "streaming": True, "shuffle_buffer": 25}},
            rows,
            lambda file: write_rows(file, list(conversations(3, 40))),
            f"data.train.0: {rows}: rows.jsonl is another",
        ),
        (
            "evaluation",
            {"data": {"eval": [str(held_out)]}, "evaluation": {"every": 6}},
            held_out,
            lambda file: write_rows(file, list(conversations(3, 4))),
            f"data.eval.0: {held_out}: held_out.jsonl is another",
        ),
    ):
        recipe, content = tiny_world.recipe(tmp_path / "runs" / name, steps=4, **changes), file.read_bytes()
        in_step(2, send(signal.SIGINT))
        assert danlu("train", recipe) == 130, name
        edit(file)
        capsys.readouterr()
        assert danlu("train", recipe) == 5, name
        told = capsys.readouterr().err
        assert said in told and "Put back what was there; or, " in told, told
        file.write_bytes(content)
        if name == "base":  # what says nothing of the model, and nothing of how the file is written
            edit_json(file, {"transformers_version": "99.0"})
        assert danlu("train", recipe) == 0, name


def test_a_checkpoint_of_an_earlier_danlu_says_nothing_of_its_inputs(
    tiny_world: World, tmp_path: Path, in_step: Callable[[int, Hook], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"path": str(tiny_world.base), "config": None}
    recipe = tiny_world.recipe(tmp_path / "run", steps=4, model=base)
    with monkeypatch.context() as patch:
        patch.setattr(train, "check_resumed", lambda checkpoint, inputs: {})
        in_step(2, send(signal.SIGINT))
        assert danlu("train", recipe) == 130
    assert "inputs" not in last_state(tmp_path / "run")[2]
    assert danlu("train", recipe) == 0
    assert "hidden_size" in last_state(tmp_path / "run")[2]["inputs"]["model.path (config.json)"]["parts"]
