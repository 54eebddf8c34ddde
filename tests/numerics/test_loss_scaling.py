from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import Parameter

from danlu.core.errors import CheckpointError, TrainingError
from danlu.numerics.loss_scaling import LossScaler, ScaleChange


def test_halves_on_overflow_and_doubles_after_a_good_stretch() -> None:
    scaler = LossScaler(scale=1024.0, growth_interval=3)
    assert scaler.update(1, finite=False) == ScaleChange(1, 1024.0, 512.0, overflow=True)
    changes = [scaler.update(step, finite=True) for step in (2, 3, 4, 5)]
    assert changes == [None, None, ScaleChange(4, 512.0, 1024.0, overflow=False), None]
    assert scaler.overflows == 1


def test_an_overflow_starts_the_good_stretch_again() -> None:
    scaler = LossScaler(scale=1024.0, growth_interval=2)
    for step, finite in enumerate((True, False, True), start=1):
        scaler.update(step, finite)
    assert scaler.scale == 512.0


def test_messages_say_what_happened() -> None:
    assert str(ScaleChange(7, 65536.0, 32768.0, True)) == (
        "step 7: loss scale 65536 -> 32768 (float16 overflow, update skipped)"
    )
    assert str(ScaleChange(7, 1024.0, 2048.0, False)) == "step 7: loss scale 1024 -> 2048 (no overflow for a while)"


def test_it_never_falls_below_the_floor() -> None:
    scaler = LossScaler(scale=1.5, floor=1.0)
    change = scaler.update(1, finite=False)
    assert change is not None and (change.before, change.after, scaler.scale) == (1.5, 1.0, 1.0)


def test_overflow_at_the_floor_stops_the_run() -> None:
    scaler = LossScaler(scale=2.0, floor=1.0)
    scaler.update(1, finite=False)
    with pytest.raises(TrainingError, match=r"step 2: .* smallest loss scale \(1\).*precision: bf16"):
        scaler.update(2, finite=False)


def test_the_scale_stops_at_its_ceiling() -> None:
    scaler = LossScaler(scale=4.0, growth_interval=1, ceiling=8.0)
    assert scaler.update(1, finite=True) is not None
    assert scaler.update(2, finite=True) is None and scaler.scale == 8.0


def test_resumed_from_json_equals_uninterrupted() -> None:
    outcomes = [True, True, False, True, True, True, False, True]
    whole, first, second = (LossScaler(growth_interval=2) for _ in range(3))
    expected = [whole.update(step, finite) for step, finite in enumerate(outcomes)]
    found = [first.update(step, finite) for step, finite in enumerate(outcomes[:4])]
    second.load(json.loads(json.dumps(first.state())))
    found += [second.update(step, finite) for step, finite in enumerate(outcomes[4:], start=4)]
    assert found == expected and second.state() == whole.state()


def test_a_state_with_a_value_missing_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the checkpoint lacks good_steps, overflows"):
        LossScaler().load({"scale": 1.0})


def test_an_injected_overflow_is_survived_and_seen() -> None:
    """A float32 master weight trained through a float16 product; the third batch overflows at the first scale."""
    weight, scaler, changes = Parameter(torch.tensor([0.5])), LossScaler(scale=2.0**12), []
    for step, x in enumerate((1.0, 1.0, 30.0, 1.0, 1.0), start=1):
        half = (weight.half() * torch.tensor([x]).half()).float()
        ((half - 0.25 * x).square().sum() * scaler.scale).backward()
        grad = weight.grad / scaler.scale
        finite = math.isfinite(grad.item())
        if (change := scaler.update(step, finite)) is not None:
            changes.append(change)
        if finite:
            with torch.no_grad():
                weight -= 0.25 * grad
        weight.grad = None
    assert changes == [ScaleChange(3, 4096.0, 2048.0, overflow=True)]
    assert weight.item() == pytest.approx(0.25 + 0.25 * 0.5**4, abs=1e-3)  # four updates made, one left out
