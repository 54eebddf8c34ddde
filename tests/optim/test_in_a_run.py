"""Optimizers with a state or gradients of their own kind in a whole run: resumed, averaged, overflowing, going back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.tiny_run import SyntheticPacks, tiny_run
from torch import Tensor

from danlu.core.errors import CheckpointError, TrainingError
from danlu.memory.pages import paged_state
from danlu.numerics.loss_scaling import LossScaler
from danlu.optim.build import build
from danlu.recipe import sections
from danlu.recipe.sections import AdamW, AdamW8bit, GaLore, Optimizer, PagedAdamW
from danlu.training.loop import fit, save, take_step
from danlu.training.metrics import read_metrics
from danlu.training.state import Run, restore
from danlu.training.watch import Watch

SECTIONS: list[Optimizer] = [
    AdamW8bit(learning_rate=1e-2, block=32, smallest=16),
    PagedAdamW(learning_rate=1e-2),
    GaLore(learning_rate=4e-2, rank=8, update_every=3, states="adamw8bit"),
]
each = pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.kind)


def each_fast(*kinds: str) -> pytest.MarkDecorator:
    """All sections, of which those of `kinds` are of the fast tests."""
    cases = fast(SECTIONS, *(section for section in SECTIONS if section.kind in kinds))
    return pytest.mark.parametrize("section", cases, ids=[section.kind for section in SECTIONS])


def run_with(folder: Path, section: Optimizer, **options: Any) -> Run:
    run = tiny_run(folder, **{"steps": 8, **options})
    run.optimizer = build(run.learner.model.named_parameters(), section, paged_state=paged_state)
    run.learner.model.embed_tokens.sparse_gradient = True
    return run


def everything(run: Run) -> dict[str, Tensor]:
    weights = {name: parameter.detach() for name, parameter in run.learner.model.named_parameters()}
    average = {} if run.ema is None else run.ema.state_tensors()
    groups = {"weight": weights, "average": average, "state": run.optimizer.state_tensors()}
    return {f"{group} {name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resume(first: Run, second: Run) -> Run:
    """Saves the first run, and puts the second one where it was."""
    save(first)
    latest = first.store.latest()
    assert latest is not None
    restore(second, latest.path)
    return second


@each
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, section: Optimizer) -> None:
    whole = run_with(tmp_path / "whole", section, ema=True)
    fit(whole)
    for after in (1, 4):
        first, second = (run_with(tmp_path / str(after), section, ema=True) for _ in range(2))
        for _ in range(after):
            take_step(first)
        fit(resume(first, second))
        assert equal(everything(second), everything(whole))
    other = run_with(tmp_path / "other", section, ema=True, source=SyntheticPacks(seed=1))
    fit(other)
    assert not equal(everything(other), everything(whole))


@each
def test_it_learns(tmp_path: Path, section: Optimizer) -> None:
    fit(run_with(tmp_path, section))
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.2


@each_fast("galore")
def test_an_overflow_is_left_out_and_a_resumed_run_is_the_same(tmp_path: Path, section: Optimizer) -> None:
    def run_over(folder: Path, overflow_after: int) -> Run:
        run = run_with(folder, section, scaler=LossScaler(scale=64.0), dtype=torch.float16)
        for matrix in (run.learner.model.layers["1"].mlp.down_proj, run.learner.model.embed_tokens):
            matrix.weight.register_hook(lambda grad: grad * (math.inf if run.state.step == overflow_after else 1.0))
        return run

    def ended(run: Run) -> dict[str, Tensor]:
        fit(run)
        return everything(run)

    whole = ended(run_over(tmp_path / "whole", 3))  # of step 4, when GaLore renews its projectors
    made = {int(tensor) for name, tensor in whole.items() if name.startswith("state step.")}
    assert made == {7}
    events = [line["event"] for line in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "event" in line]
    assert events == ["overflow"]
    for after in (3, 4):
        first = run_over(tmp_path / str(after), 3)
        for _ in range(after):
            take_step(first)
        assert equal(ended(resume(first, run_over(tmp_path / str(after), 3))), whole)
    assert not equal(ended(run_over(tmp_path / "other", 4)), whole)


class StrikesOnce(Watch):
    """Calls the seventh step that it judges a spike."""

    judged = 0

    def spike_reason(self, loss: float, grad_norm: float) -> str:
        self.judged += 1
        return "made up" if self.judged == 7 else super().spike_reason(loss, grad_norm)


@each_fast("paged-adamw")
def test_going_back_after_a_spike_ends_where_a_run_without_those_rows_does(tmp_path: Path, section: Optimizer) -> None:
    rewound, without, plain = (run_with(tmp_path / name, section) for name in ("rewound", "without", "plain"))
    rewound.watch = StrikesOnce(sections.Watch(policy="rewind"))
    without.data_loader.excluded = {18, 19, 20}  # the packs of step 7
    for run in (rewound, without, plain):
        fit(run)
    assert rewound.state.rewinds == 1
    assert equal(everything(rewound), everything(without))
    assert not equal(everything(rewound), everything(plain))


def test_a_gradient_that_is_not_finite_is_named_though_it_is_projected(tmp_path: Path) -> None:
    run = run_with(tmp_path, SECTIONS[2])
    take_step(run)
    before = {name: tensor.clone() for name, tensor in everything(run).items()}
    run.learner.model.layers["1"].mlp.down_proj.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=r"gradient is not, in layers\.1\.mlp\.down_proj\.weight"):
        take_step(run)
    assert equal(everything(run), before)


def test_a_checkpoint_of_another_optimizer_or_setting_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path, SECTIONS[2])
    take_step(run)
    save(run)
    latest = run.store.latest()
    assert latest is not None
    with pytest.raises(CheckpointError, match="holds the state of optimizer 'galore', the recipe asks for 'adamw'"):
        restore(run_with(tmp_path, AdamW()), latest.path)
    with pytest.raises(CheckpointError, match=r"does not fit this run:\n  optimizer\.\w+\.layers.*\b8\b"):
        restore(run_with(tmp_path, SECTIONS[2].model_copy(update={"rank": 7})), latest.path)
