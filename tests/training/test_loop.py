"""The loop as a whole: resumed equals uninterrupted bit for bit, and what it does about faults and spikes."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.covering import fast
from builders.tiny_run import SyntheticPacks, tiny_run
from builders.tiny_world import reproducible

from danlu.core.errors import DanluError, DataError, ModelError, RecipeError, ResourceError, TrainingError
from danlu.core.types import Pack, Sample
from danlu.numerics.loss_scaling import LossScaler
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.recipe import sections
from danlu.stages.learner import DecoderLearner
from danlu.training import loop
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.checkpoints.verification import verify
from danlu.training.criterion import Criterion
from danlu.training.evaluation import Scores
from danlu.training.loop import fit, take_step
from danlu.training.metrics import read_metrics
from danlu.training.out_of_memory import OutOfMemory
from danlu.training.state import Run, restore, snapshot


def everything(run: Run) -> dict[str, Any]:
    tensors = {f"model.{name}": p.detach() for name, p in run.learner.model.named_parameters()}
    tensors |= {f"optimizer.{name}": t for name, t in run.optimizer.state_tensors().items()}
    if run.ema is not None:
        tensors |= {f"ema.{name}": t for name, t in run.ema.state_tensors().items()}
    return tensors


def differences(one: Run, other: Run) -> list[str]:
    ours, theirs = everything(one), everything(other)
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def lines(folder: Path) -> list[Mapping[str, Any]]:
    return [reproducible(line) for line in read_metrics(folder / "metrics.jsonl")]


def test_a_step_that_runs_out_of_memory_is_put_back_saved_before_and_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_run(tmp_path / "whole", ema=True)
    fit(whole)
    first = tiny_run(tmp_path / "parts", ema=True)
    accumulate, calls = loop.accumulate, 0

    def lacking(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        gradients = accumulate(*arguments, **options)
        if calls == 4:
            torch.empty(2**50, dtype=torch.uint8)  # gradients are there already
        return gradients

    monkeypatch.setattr(loop, "accumulate", lacking)
    with pytest.raises(OutOfMemory, match=r"step 4, .*out of memory when 1024 TiB more were asked for"):
        fit(first)
    latest = first.store.latest()
    assert latest is not None and latest.step == 3
    second = tiny_run(tmp_path / "parts", ema=True)
    restore(second, latest.path)
    fit(second)
    assert differences(whole, second) == []
    assert differences(whole, first) != []  # control


def test_an_update_that_runs_out_of_memory_half_way_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path)
    step, steps = run.optimizer.step, 0

    def lacking(free_gradients: bool = False) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise MemoryError
        step(free_gradients)

    monkeypatch.setattr(run.optimizer, "step", lacking)
    with pytest.raises(MemoryError):
        fit(run)
    latest = run.store.latest()
    assert latest is not None and latest.step == 2  # the ordinary one


@pytest.mark.parametrize("dtype", fast([torch.float32, torch.bfloat16, torch.float16], torch.float32, torch.float16))
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    def new(folder: str) -> Run:
        scaler = LossScaler() if dtype == torch.float16 else None
        return tiny_run(tmp_path / folder, dtype=dtype, ema=True, evaluation=3, scaler=scaler)

    whole = new("whole")
    fit(whole)
    first = new("parts")
    while first.state.step < 5:  # killed in step 6, with checkpoints of 2 and 4 behind it
        take_step(first)
        if first.state.step == 3:
            loop.assess(first)
        if first.due(first.cadence.checkpoint, since=first.state.saved_step):
            loop.save(first)
    first.metrics.close()
    for kept in (4, 2):
        again = new("parts")
        state = restore(again, tmp_path / "parts" / "checkpoints" / f"step-{kept:08d}")
        again.metrics.truncate(state["metrics_lines"])
        fit(again)
        assert again.state.step == whole.state.step == 6
        assert differences(whole, again) == []
        assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_a_restored_run_has_the_whole_state_that_was_saved(tmp_path: Path) -> None:
    """Everything that is no tensor: counters, position, the watch's window, the loss scale, updates of the average."""
    scalers = [LossScaler(growth_interval=2) for _ in range(2)]
    first, again = (
        tiny_run(tmp_path / name, ema=True, scaler=scaler) for name, scaler in zip("ab", scalers, strict=True)
    )
    for _ in range(3):
        take_step(first)
    loop.save(first)
    first.store.wait()
    fresh = snapshot(again)[1]
    latest = first.store.latest()
    assert latest is not None
    restore(again, latest.path)
    saved, found = snapshot(first)[1], snapshot(again)[1]
    for state in (saved, found, fresh):
        del state["metrics_lines"]  # of a file that goes on by itself
    assert found == saved and len(saved["watch"]["losses"]) == 3
    assert [key for key in saved if fresh[key] == saved[key]] == ["micro", "total_steps", "finished"]


def test_negative_control_another_data_position_is_seen(tmp_path: Path) -> None:
    whole = tiny_run(tmp_path / "whole")
    fit(whole)
    part = tiny_run(tmp_path / "part")
    restore(part, tmp_path / "whole" / "checkpoints" / "step-00000004")
    part.data_loader.next += 1
    fit(part)
    assert "model.norm.weight" in differences(whole, part)


def test_a_stop_request_saves_and_leaves(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, steps=50, checkpoint=20)
    import signal

    with run.stop_request:
        take_step(run)
        signal.raise_signal(signal.SIGTERM)
        fit(run)
    assert run.stop_request.exit_code == 143
    assert run.store.latest() is not None and run.store.latest().step == 1  # type: ignore[union-attr]


class Poisoned(SyntheticPacks):
    """One step's packs hold noise, whose loss stands out once the model has learnt to count."""

    def __init__(self, at: Container[int]) -> None:
        super().__init__()
        self.poisoned = at

    def at(self, n: int) -> Pack:
        pack = super().at(n)
        if n not in self.poisoned:
            return pack
        noise = np.random.default_rng(n).permutation(64).astype(np.int32)
        weights = np.ones(64, dtype=np.float32)
        weights[0] = 0
        return Pack((Sample(noise, weights, f"noise.jsonl:{n}"),))


WATCH = {"loss_spike": 4.0, "window": 16}


@pytest.mark.parametrize("policy", ["warn", "skip", "rewind"])
def test_a_spike_is_met_with_the_policy(tmp_path: Path, policy: Any) -> None:
    steps = 28
    watch = sections.Watch(policy=policy, **WATCH)  # type: ignore[arg-type]
    run = tiny_run(tmp_path, steps=steps, source=Poisoned(range(75, 78)), watch=watch, checkpoint=5)
    fit(run)
    assert run.state.step == steps
    events = [line for line in lines(tmp_path) if "event" in line]
    assert [event["event"] for event in events] == (["spike", "rewind"] if policy == "rewind" else ["spike"])
    assert "robust standard deviations above the median" in events[0]["reason"]
    if policy == "rewind":
        assert events[1]["back_to"] == 25 and events[1]["step"] == 26
        assert run.data_loader.excluded == {75, 76, 77}


def test_packs_left_out_by_a_rewind_stay_left_out_on_resume(tmp_path: Path) -> None:
    def new(folder: str) -> Run:
        watch = sections.Watch(policy="rewind", **WATCH)  # type: ignore[arg-type]
        return tiny_run(tmp_path / folder, steps=29, source=Poisoned(range(81, 84)), watch=watch, checkpoint=5)

    whole = new("whole")
    fit(whole)
    assert whole.state.rewinds == 1 and whole.data_loader.excluded == {81, 82, 83}
    part = new("part")
    while not (part.state.rewinds and part.state.step == 26):  # after going back to 25, before the noise is met again
        take_step(part)
        if part.due(part.cadence.checkpoint, since=part.state.saved_step):
            loop.save(part)
    assert part.data_loader.next == 78
    loop.save(part)
    part.metrics.close()
    again = new("part")
    again.metrics.truncate(restore(again, tmp_path / "part" / "checkpoints" / "step-00000026")["metrics_lines"])
    fit(again)
    assert again.state.rewinds == 1 and again.data_loader.excluded == {81, 82, 83}
    assert differences(whole, again) == []
    assert lines(tmp_path / "part") == lines(tmp_path / "whole")


def test_a_second_rewind_leaves_out_the_packs_of_the_first_too(tmp_path: Path) -> None:
    """Both go back to step 25, behind which the packs of the first are met again."""
    watch = sections.Watch(policy="rewind", **WATCH)  # type: ignore[arg-type]
    poisoned = {75, 76, 77, 84, 85, 86}
    run = tiny_run(tmp_path, steps=31, source=Poisoned(poisoned), watch=watch, checkpoint=5)
    fit(run)
    events = [(line["event"], line["step"]) for line in lines(tmp_path) if "event" in line]
    assert [step for event, step in events if event == "rewind"] == [26, 28]
    assert run.data_loader.excluded == poisoned and (run.state.step, run.state.rewinds) == (31, 2)


def test_a_rewind_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    watch = sections.Watch(policy="rewind", **WATCH)  # type: ignore[arg-type]
    run = tiny_run(tmp_path, steps=28, source=Poisoned(range(75, 78)), watch=watch, checkpoint=1000)
    with pytest.raises(TrainingError, match="no checkpoint to go back to"):
        fit(run)


def test_an_fp16_overflow_is_survived_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, dtype=torch.float16, scaler=LossScaler(scale=64.0))
    real = loop.accumulate

    def overflow_in_step_3(*arguments: Any, step: int, **options: Any) -> Any:
        gradients = real(*arguments, step=step, **options)
        if step == 3:
            run.learner.model.norm.weight.grad[0] = math.inf  # type: ignore[index]
            return type(gradients)(**{**gradients.__dict__, "norm": math.inf})
        return gradients

    monkeypatch.setattr(loop, "accumulate", overflow_in_step_3)
    fit(run)
    assert run.state.step == 6 and run.scaler is not None and run.scaler.scale == 32.0
    events = [line for line in lines(tmp_path) if line.get("event") == "overflow"]
    assert events == [{"step": 3, "event": "overflow", "before": 64.0, "after": 32.0}]
    assert all(p.isfinite().all() for p in run.learner.model.parameters())


def test_a_non_finite_loss_stops_and_the_last_good_state_is_saved(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, steps=10, checkpoint=100)
    for _ in range(3):
        take_step(run)
    good = {name: p.detach().clone() for name, p in run.learner.model.named_parameters()}
    real = run.learner.model.norm.weight
    with torch.no_grad():
        held = real[0].item()
        run.learner.model.norm.register_forward_hook(lambda module, inputs, output: output * math.nan)
    with pytest.raises(TrainingError, match=r"step 4: the loss is not finite, first in the output of norm"):
        fit(run)
    assert real[0].item() == held
    latest = run.store.latest()
    assert latest is not None and latest.step == 3
    again = tiny_run(tmp_path / "again", steps=10)
    restore(again, latest.path)
    assert again.data_loader.next == 9  # the step that failed starts with the same rows
    for name, parameter in again.learner.model.named_parameters():
        assert torch.equal(parameter, good[name])


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run with evaluations that has ended, and its folder."""
    folder = tmp_path_factory.mktemp("evaluated")
    run = tiny_run(folder, evaluation=3)
    fit(run)
    return run, folder


@pytest.mark.parametrize("kind", fast([ModelError, DataError, ResourceError, RecipeError], ModelError, RecipeError))
def test_an_evaluation_that_fails_loses_no_step(
    tmp_path: Path, evaluated: tuple[Run, Path], kind: type[DanluError]
) -> None:
    whole, its_folder = evaluated

    def fail(prompts: Sequence[str]) -> list[str]:
        raise kind("not finite at position 9")

    run = tiny_run(tmp_path / "run", evaluation=3, checkpoint=100)
    run.sample_prompts, run.generate = ["Who?"], fail
    with pytest.raises(kind, match="^step 3, while evaluating: not finite at position 9$"):
        fit(run)
    latest = run.store.latest()
    assert latest is not None and latest.step == 3 and verify(latest.path) == []
    again = tiny_run(tmp_path / "run", evaluation=3)
    again.metrics.truncate(restore(again, latest.path)["metrics_lines"])  # type: ignore[union-attr]
    fit(again)
    assert differences(whole, again) == []
    assert lines(tmp_path / "run") == lines(its_folder), "the evaluation is made up for"


def test_what_keeps_a_state_from_being_saved_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(prompts: Sequence[str]) -> list[str]:
        raise ModelError("not finite at position 9")

    def full(*arguments: Any, **options: Any) -> Path:
        raise ResourceError("no room")

    run = tiny_run(tmp_path, evaluation=3, checkpoint=100)
    run.sample_prompts, run.generate = ["Who?"], fail
    monkeypatch.setattr(run.store, "save", full)
    with pytest.raises(ModelError) as caught:
        fit(run)
    assert str(caught.value) == (
        "step 3, while evaluating: not finite at position 9\nNor could the state of step 3 be saved: no room"
    )


def test_rows_that_cannot_be_read_lose_no_step(tmp_path: Path) -> None:
    class Breaking(SyntheticPacks):
        def at(self, n: int) -> Pack:
            if n == 10:  # the second of step 4
                raise DataError("rows.jsonl:31: broken JSON")
            return super().at(n)

    whole = tiny_run(tmp_path / "whole")
    fit(whole)
    run = tiny_run(tmp_path / "run", source=Breaking(), checkpoint=100)
    with pytest.raises(DataError, match="rows.jsonl:31"):
        fit(run)
    latest = run.store.latest()
    assert latest is not None and latest.step == 3
    again = tiny_run(tmp_path / "run")
    restore(again, latest.path)
    assert again.data_loader.next == 9
    fit(again)
    assert differences(whole, again) == []


class PartlyUntrained(SyntheticPacks):
    """Some packs carry no weight."""

    def __init__(self, untrained: range) -> None:
        super().__init__()
        self.untrained = untrained

    def at(self, n: int) -> Pack:
        pack = super().at(n)
        if n not in self.untrained:
            return pack
        return Pack(tuple(Sample(one.tokens, np.zeros_like(one.weights), one.row) for one in pack.samples))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_without_targets_is_left_out_and_told(tmp_path: Path, dtype: torch.dtype) -> None:
    def new(folder: str, untrained: range) -> Run:
        scaler = LossScaler(scale=64.0) if dtype == torch.float16 else None
        return tiny_run(tmp_path / folder, source=PartlyUntrained(untrained), dtype=dtype, scaler=scaler, ema=True)

    run = new("whole", range(9, 12))  # step 4
    for _ in range(3):
        take_step(run)
    loop.save(run)
    before = {name: tensor.clone() for name, tensor in everything(run).items()}
    take_step(run)
    assert run.state.step == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(run).items())
    assert all(parameter.grad is None for parameter in run.learner.model.parameters())
    fit(run)
    assert run.state.step == 6
    told = [line for line in lines(tmp_path / "whole") if "event" in line]
    assert [(line["step"], line["event"]) for line in told] == [(4, "no_targets")]
    assert "made.jsonl:9.0" in told[0]["rows"]
    assert [line["step"] for line in lines(tmp_path / "whole") if "loss" in line] == [1, 2, 3, 5, 6]
    assert all(p.isfinite().all() for p in run.learner.model.parameters())

    again = new("again", range(9, 12))  # from the checkpoint just before it
    restore(again, tmp_path / "whole" / "checkpoints" / "step-00000003")
    fit(again)
    assert differences(run, again) == []
    control = new("control", range(0))  # where it has targets the step does change the weights
    fit(control)
    assert differences(run, control)


def test_early_stop_ends_the_run(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, steps=50, evaluation=1, early_stop=sections.EarlyStop(patience=2, min_delta=100.0))
    fit(run)
    assert run.state.ended_early and run.state.step == 3  # the first sets the mark, two do not beat it by 100
    assert [line["event"] for line in lines(tmp_path) if "event" in line] == ["early_stop"]


def test_a_run_is_judged_by_the_metric_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls in every evaluation, the accuracy rises twice, is NaN once and falls from there."""
    scores = iter([(3.0, 0.5), (2.9, math.nan), (2.8, 0.7), (2.7, 0.6), (2.6, 0.71)])

    def evaluate(learner: Any, items: Any, **options: Any) -> Scores:
        loss, accuracy = next(scores)
        return Scores(loss, {"accuracy": accuracy})

    monkeypatch.setattr(loop, "evaluate", evaluate)
    run = tiny_run(tmp_path, steps=50, evaluation=1, early_stop=sections.EarlyStop(patience=2, min_delta=0.05))
    run.criterion = Criterion("accuracy", higher_is_better=True)
    fit(run)
    assert run.state.step == 5 and run.state.ended_early
    assert (run.state.best_metric, run.state.best_value) == ("accuracy", 0.7)
    event = next(line for line in lines(tmp_path) if "event" in line)
    assert event["best_accuracy"] == 0.7 and event["evaluations"] == 2


def test_a_checkpoint_that_knows_the_loss_alone_is_resumed(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", evaluation=1)
    take_step(run)
    loop.assess(run)
    loop.save(run)
    best = run.state.best_value
    assert best is not None
    file = tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json"
    state = json.loads(file.read_text())
    assert state["run"].pop("best_metric") == "loss"
    state["run"]["best_loss"] = state["run"].pop("best_value")
    old = tiny_run(tmp_path / "old")
    CheckpointStore(tmp_path / "old" / "checkpoints", background=False).save(1, snapshot(run)[0], state)
    restore(old, tmp_path / "old" / "checkpoints" / "step-00000001")
    assert (old.state.best_value, old.state.best_metric) == (best, "loss")


class CrossEntropyOverSteps(CrossEntropy):
    """Counts, as losses over pairs do, what its mean is over: here none in every step but those of `packs_with_any`."""

    packs_with_any = ("made.jsonl:0.0", "made.jsonl:6.0")  # steps 1 and 3

    def divisors(self, items: Iterable[Pack]) -> Mapping[str, float]:
        return {"pairs": float(sum(pack.rows[0] in self.packs_with_any for pack in items))}


def test_a_step_without_anything_that_its_objective_divides_by_is_left_out_and_told(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    assert isinstance(run.learner, DecoderLearner)
    run.learner = replace(run.learner, objective=CrossEntropyOverSteps())
    fit(run)
    assert [line["step"] for line in lines(tmp_path) if line.get("event") == "no_targets"] == [2, 4, 5, 6]
    assert [line["step"] for line in lines(tmp_path) if "loss" in line] == [1, 3]
