"""What the loop knows of what it trains: a `Learner` makes micro-batches of items, and their loss.

`danlu.language.learner` has the ones of language models, `danlu.images.classifier` the one of classifiers of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from danlu.parallel.step_parallel import StepParallel
from danlu.train.memory_parts import Activations
from danlu.types import Item, Loss, MicroBatch, Totals

ItemT = TypeVar("ItemT", bound=Item)
BatchT = TypeVar("BatchT", bound=MicroBatch)


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
    def parallel(self) -> StepParallel: ...

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

    def dropout(self, step: int, items: Sequence[tuple[int, ItemT]]) -> AbstractContextManager[None]:
        """Around forward and backward pass of the micro-batch of `items`, each with its number in the step.

        Dropout masks follow from (step, number in the step), and from nothing else.
        """

    def losses(self, batch: BatchT, totals: Totals, gradient_scale: float = 1.0) -> Loss:
        """The objective's loss of a micro-batch, a term of the step's.

        gradient_scale: multiplies the gradient and not the value, for fp16.
        """

    def assess(self, batch: BatchT, totals: Totals) -> Loss:
        """The loss of a micro-batch as evaluation reports it, without gradients; `totals` are of all held-out items."""

    def explain(self, batch: BatchT, step: int) -> Exception:
        """Why the loss of `batch` is not finite. Every process must ask, for it takes collectives to find out."""
