"""What processes saw of a run beside what one process saw: in float32 the same to a millionth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from builders.equal_shards import assemble_equal
from danlu.numerics.relative_error import relative_error
from danlu.verification.trace import Trace


def distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative distance of a tensor, and which it is; infinite where one side lacks a tensor."""
    if missing := sorted(found.keys() ^ wanted.keys()):
        return math.inf, missing[0]
    errors = {name: _error(name, found[name], value) for name, value in wanted.items()}  # none is NaN
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def _error(name: str, found: Tensor, wanted: Tensor) -> float:
    """The relative error; of means of log-ratios that an objective keeps, which are near 0, the error in nats."""
    return float((found - wanted).abs().max()) if name.startswith("objective.") else relative_error(found, wanted)


def gradients(seen: Sequence[Trace], step: int) -> dict[str, Tensor]:
    return assemble_equal([one.steps[step].gradients for one in seen])


def weights(seen: Sequence[Trace], step: int) -> dict[str, Tensor]:
    return assemble_equal([one.steps[step].weights for one in seen])


def differences(many: Sequence[Trace], one: Trace) -> list[str]:
    found = []
    for step, wanted in enumerate(one.steps):
        pairs = [("gradient", gradients(many, step), gradients([one], step))]
        pairs += [("weight", weights(many, step), weights([one], step))]
        for what, got, want in pairs:
            error, name = distance(got, want)
            found += [f"step {step + 1}: {what} of {name} is {error:.1e} off"] if not error < 1e-6 else []
        for seen in many:
            got, want = (seen.steps[step].loss, seen.steps[step].grad_norm), (wanted.loss, wanted.grad_norm)
            found += [f"step {step + 1}: loss and norm {got}, not {want}"] if got != approx(want) else []
    assert one.evaluation is not None
    evaluations = [seen.evaluation for seen in many]
    return found + ([f"evaluation {evaluations}"] if evaluations != approx([one.evaluation] * len(many)) else [])


def approx(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6)
