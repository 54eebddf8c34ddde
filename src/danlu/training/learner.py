"""What the loop knows of what it trains: a `Learner` makes micro-batches of items, and their loss.

`danlu.stages.learner` has the ones of language models, `danlu.stages.classifier` the one of classifiers of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from danlu.core.types import Item, Loss, MicroBatch, Totals
from danlu.parallel.parallel_context import ParallelContext
from danlu.training.memory_parts import Activations

ItemT = TypeVar("ItemT", bound=Item)
BatchT = TypeVar("BatchT", bound=MicroBatch)

Activation = tuple[Tensor, ...]
"""What passes from a chunk of a model to the next one for a micro-batch: the hidden states of each model that is
trained (the policy, and a model of values), whose gradients come back, and behind them those of the frozen models that
are asked about the micro-batch too, each through the same chunks."""


@dataclass(frozen=True)
class MicroStep(Generic[BatchT]):
    """One micro-batch of a step or of an evaluation, with what its passes have to know of the whole."""

    batch: BatchT
    items: Sequence[tuple[int, Any]]  # of the batch, each with its number in the step; none on a process without any
    totals: Totals  # of the whole step, or of all held-out items
    step: int | None = None  # None in an evaluation, which has no gradients
    gradient_scale: float = 1.0  # multiplies the gradient and not the loss, for fp16


class Learner(Protocol[ItemT, BatchT]):
    """A model on the device with its objective, ready for the steps of a run."""

    @property
    def model(self) -> nn.Module: ...  # the policy

    @property
    def device(self) -> torch.device: ...

    @property
    def micro(self) -> int: ...  # items in a micro-batch

    @property
    def activations(self) -> Activations | None: ...  # counts what autograd keeps, where that can be counted

    @property
    def parallel(self) -> ParallelContext: ...

    @property
    def trained_activations(
        self,
    ) -> int: ...  # tensors of an `Activation`, the first ones, that have gradients in a step

    def weights(self) -> dict[str, Tensor]:
        """What training changes, by name, live, without autograd: as much of each tensor as this process has.

        The parameters of the policy (or of the adapter that is trained in its place), then the objective's own
        parameters and running statistics.
        """

    def totals(self, items: Sequence[ItemT]) -> Totals:
        """What a step of `items` (of all processes) consists of, with the divisors that the objective asks for."""

    def micro_batches(self, items: Sequence[ItemT]) -> Sequence[Sequence[int]]:
        """The numbers of the items in each micro-batch of this process; as many on every process, some may be empty."""

    def prepare(
        self, items: Sequence[ItemT], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[ItemT]:
        """The items with what has to be known of the whole step before its first micro-batch.

        Where the objective asks for nothing of the kind, they are returned as they are; else every process must call
        it, for it takes passes without gradients and collectives. step: whose dropout is applied; None: none.
        """

    def end_step(self) -> Mapping[str, float]:
        """Called on every process after a step's last backward pass: what its model has counted in it, to be logged."""

    def updated(self, step: int) -> None:
        """Called on every process after the optimizer has changed the weights in `step`."""

    def collate(self, items: Sequence[ItemT]) -> BatchT:
        """The micro-batch of `items` on the device; of no items, one without targets, for a process that has none."""

    def at(self, micro_step: MicroStep[BatchT]) -> AbstractContextManager[None]:
        """Around each forward and each backward pass of a micro-batch: the state of the model that belongs to it.

        Dropout masks follow from (step, number of an item in the step), and from nothing else; an evaluation has none.
        """

    def forward(self, chunk: int, micro_step: MicroStep[BatchT], x: Activation | None) -> Activation | Loss:
        """The output of a chunk of the model; of the last one the objective's loss, a term of the step's.

        In an evaluation that is the loss as evaluation reports it, without gradients. x: what the chunk before has
        returned for the same micro-batch; None for chunk 0.
        """

    def empty_activation(self, micro_step: MicroStep[BatchT]) -> Activation:
        """Tensors of the shapes and types of what passes between two chunks for a micro-batch, without values."""

    def explain(self, batch: BatchT, step: int) -> Exception:
        """Why the loss of `batch` is not finite. Every process must ask, for it takes collectives to find out."""


class MicroSteps(Protocol):
    """The micro-batches that a list of actions is carried out for."""

    def micro_step(self, learner: Learner[Any, Any], micro: int) -> MicroStep[Any] | None:
        """The micro-batch of that number, on the learner's device; None where the list ends before it.

        Each is asked for once, in rising order; all processes give the same answer.
        """


@dataclass(frozen=True)
class StepItems:
    """What one process takes up in a step, or in an evaluation, and in which micro-batches."""

    items: Sequence[Item]  # those of all processes
    micro_batches: Sequence[Sequence[int]]  # numbers of the items of each
    totals: Totals
    step: int | None = None  # None in an evaluation
    gradient_scale: float = 1.0

    def micro_step(self, learner: Learner[Any, Any], micro: int) -> MicroStep[Any]:
        """The micro-batch of that number, on the learner's device."""
        numbered = [(number, self.items[number]) for number in self.micro_batches[micro]]
        batch = learner.collate([item for _, item in numbered])
        return MicroStep(batch, numbered, self.totals, self.step, self.gradient_scale)
