"""Chunks of a model that sleep instead of computing: a pipeline of any number of stages on a machine of few cores."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from danlu.core.types import Loss
from danlu.core.weight_gradients import Deferral, deferral_of, made_or_deferred
from danlu.parallel.parallel_context import ParallelContext
from danlu.training.learner import Activation, MicroStep

WIDTH = 4  # of what chunks send


class InFlight:
    """How many activations are alive, and how many were at most."""

    def __init__(self) -> None:
        self.count = self.peak = 0

    def activation(self) -> object:
        """Something that is kept, and counted, as long as an activation is."""
        self.count += 1
        self.peak = max(self.peak, self.count)
        kept = _Activation()
        weakref.finalize(kept, self._freed)
        return kept

    def _freed(self) -> None:
        self.count -= 1


class _Activation:
    pass


@dataclass(frozen=True)
class SleepingLearner:
    """What an executor asks of a learner. Forward, input and weight pass of a chunk sleep for a unit each, a backward
    pass that is not split for two.

    Items are tensors [WIDTH], and a micro-batch one of them [1, WIDTH]; each chunk adds a weight [WIDTH], and the loss
    is the sum, so that every gradient is 1.
    """

    parallel: ParallelContext
    unit_s: float
    in_flight: InFlight = field(default_factory=InFlight)
    weights: dict[int, nn.Parameter] = field(init=False)  # by chunk, of those of this process
    activations: None = None  # which the executor would have counted in bytes
    trained_activations: int = 1

    def __post_init__(self) -> None:
        chunks = self.parallel.chunks
        object.__setattr__(self, "weights", {chunk: nn.Parameter(torch.zeros(WIDTH)) for chunk in chunks})

    def collate(self, items: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(items))

    @contextmanager
    def at(self, micro_step: MicroStep[Any]) -> Iterator[None]:
        yield

    def empty_activation(self, micro_step: MicroStep[Any]) -> Activation:
        return (torch.empty(1, WIDTH),)

    def forward(self, chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Activation | Loss:
        weight = self.weights[chunk]
        deferral = deferral_of(weight)
        trained = weight if deferral is None else deferral.anchor
        (given,) = (micro_step.batch,) if x is None else x
        y: Tensor = _SleepingSum.apply(given, trained, deferral, self.unit_s, self.in_flight.activation())
        return Loss(y.sum(), {}) if chunk == self.parallel.num_chunks - 1 else (y,)


class _SleepingSum(torch.autograd.Function):
    """x [1, WIDTH] plus a weight [WIDTH]. Its activation is alive until the weight's gradient has been made."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, deferral: Deferral | None, unit_s: float, activation: object
    ) -> Tensor:
        if deferral is not None:
            (weight,) = deferral.weights
        ctx.deferral, ctx.unit_s, ctx.activation = deferral, unit_s, activation
        time.sleep(unit_s)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # type: ignore[override]
        time.sleep(ctx.unit_s)
        make = partial(_weight_gradient, ctx.unit_s, ctx.activation)
        (grad_weight,) = made_or_deferred(ctx.deferral, make, grad)
        return grad.clone(), grad_weight, None, None, None


def _weight_gradient(unit_s: float, activation: object, grad: Tensor) -> tuple[Tensor]:
    """Of what a linear layer makes it of, the activation is only kept."""
    time.sleep(unit_s)
    return (grad.sum(0),)
