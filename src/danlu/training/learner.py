"""The interface of the loop to its model: a `Learner` makes micro-batches of items, and their loss.

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
"""Tensors that pass from a chunk of a model to the next one for a micro-batch: the hidden states of each model that is
trained (the policy, and a value model), which get gradients back, and after them those of the frozen models that run on
the micro-batch too, each through the same chunks."""


@dataclass(frozen=True)
class MicroStep(Generic[BatchT]):
    """One micro-batch of a step or of an evaluation, with the facts of the whole that its passes need."""

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
        """All trained tensors, by name, live, without autograd: this process's shard of each.

        The parameters of the policy (or of the adapter that is trained in its place), then the objective's own
        parameters and running statistics.
        """

    def totals(self, items: Sequence[ItemT]) -> Totals:
        """The totals of a step of `items` (of all processes), with the divisors that the objective asks for."""

    def micro_batches(self, items: Sequence[ItemT]) -> Sequence[Sequence[int]]:
        """The numbers of the items in each micro-batch of this process; as many on every process, some may be empty."""

    def prepare(
        self, items: Sequence[ItemT], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[ItemT]:
        """Adds to the items the facts of the whole step that are needed before its first micro-batch.

        Where the objective needs none, they are returned as they are; else every process must call it, for it takes
        passes without gradients and collectives. step: the step that dropout is of; None: no dropout.
        """

    def end_step(self) -> Mapping[str, float]:
        """Ends a step, on every process after its last backward pass: returns the model's counts of the step, to be
        logged."""

    def updated(self, step: int) -> None:
        """Called on every process after the optimizer has changed the weights in `step`."""

    def collate(self, items: Sequence[ItemT]) -> BatchT:
        """The micro-batch of `items` on the device; of no items, one without targets, for a process that has none."""

    def at(self, micro_step: MicroStep[BatchT]) -> AbstractContextManager[None]:
        """A context around each forward and each backward pass of a micro-batch: the state of the model that belongs to
        it.

        Dropout masks follow from (step, number of an item in the step), and from nothing else; an evaluation has none.
        """

    def forward(self, chunk: int, micro_step: MicroStep[BatchT], x: Activation | None) -> Activation | Loss:
        """The output of a chunk of the model; of the last one the objective's loss, a term of the step's.

        In an evaluation that is the loss as evaluation reports it, without gradients. x: the output of the chunk before
        for the same micro-batch; None for chunk 0.
        """

    def empty_activation(self, micro_step: MicroStep[BatchT]) -> Activation:
        """Makes tensors of the shapes and types that pass between two chunks for a micro-batch, without values."""

    def explain(self, batch: BatchT, step: int) -> Exception:
        """Explains why the loss of `batch` is not finite. Every process must call it, for it needs collectives."""


class MicroSteps(Protocol):
    """The micro-batches that a list of actions is carried out for."""

    def micro_step(self, learner: Learner[Any, Any], micro: int) -> MicroStep[Any] | None:
        """The micro-batch of that number, on the learner's device; None where the list ends before it.

        Each is asked for once, in rising order; all processes give the same answer.
        """


@dataclass(frozen=True)
class StepItems:
    """The items of a step or of an evaluation, and their micro-batches on one process."""

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
