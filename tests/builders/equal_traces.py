"""Compares what processes saw of a run with what one process saw: float32 agrees to a millionth, or to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from builders.equal_shards import assemble_equal
from danlu.numerics.relative_error import relative_error
from danlu.verification.trace import Trace

Seen = tuple[list[Trace], Trace, Trace]
"""A case as its processes saw it, as one process saw it, and as one process saw it from rounded weights."""


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


def differences(many: Sequence[Trace], one: Trace, rounded: Trace | None = None) -> list[str]:
    """Where processes and one process differ.

    rounded: one process that starts from weights which are one unit of float32's last place away. Where that alone
    moves the gradients of a step further than a millionth, they may differ by as much: the gradient of a decay, or of
    a LoRA below a capped softmax, is a small sum of large terms, and two orders of adding agree no better.
    """
    found = []
    for step, wanted in enumerate(one.steps):
        pairs = [("gradient", gradients(many, step), gradients([one], step))]
        pairs += [("weight", weights(many, step), weights([one], step))]
        bound = {"gradient": 1e-6, "weight": 1e-6}
        if rounded is not None:
            by_rounding, _ = distance(gradients([rounded], step), gradients([one], step))
            assert by_rounding < 1e-5  # more would hide mistakes
            bound["gradient"] = max(1e-6, by_rounding)
        for what, got, want in pairs:
            error, name = distance(got, want)
            found += [f"step {step + 1}: {what} of {name} is {error:.1e} off"] if not error < bound[what] else []
        for seen in many:
            got, want = (seen.steps[step].loss, seen.steps[step].grad_norm), (wanted.loss, wanted.grad_norm)
            found += [f"step {step + 1}: loss and norm {got}, not {want}"] if got != approx(want) else []
    assert one.evaluation is not None
    evaluations = [seen.evaluation for seen in many]
    return found + ([f"evaluation {evaluations}"] if evaluations != approx([one.evaluation] * len(many)) else [])


def approx(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6)
