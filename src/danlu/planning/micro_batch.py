"""The micro-batch that fits into memory, from bytes that are counted elsewhere. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from danlu.planning.activation_memory import ActivationBytes


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a training step takes on one process, by how they grow with its micro-batch."""

    fixed: int
    """Bytes that do not depend on the micro-batch: weights, gradients, optimizer state, gathered parameters."""
    activations: ActivationBytes
    """Activations of one packed sequence, with the recomputation, offload and tensor degree of the recipe."""
    loss_workspace: int
    """Bytes of the loss in addition to its inputs, for one packed sequence."""
    max_loss_workspace: int
    """The same, however many packed sequences there are: the loss takes its logits slice by slice."""
    smallest: int = 1
    """Packed sequences of the smallest micro-batch: a row with two answers is never cut in two."""

    @property
    def of_smallest(self) -> int:
        """The most bytes of a step with the smallest possible micro-batches."""
        count, each = self.smallest, self.activations
        activations = ActivationBytes(count * each.kept, count * each.recomputed)
        return self.fixed + activations.peak(min(count * self.loss_workspace, self.max_loss_workspace))

    def largest_micro_batch(self, available_bytes: float, at_most: int, *, share: float = 1.0) -> int:
        """The most packed sequences in a micro-batch with a step that fits into the available bytes; at least 1,
        whatever it takes.

        available_bytes: for all of the step. share: the share that may be taken of the bytes which the fixed part
        leaves.
        """
        each, free = self.activations, available_bytes - self.fixed
        # The two peaks of a step: at the loss, and in the backward pass of a layer that recomputes.
        at_loss = share * (free - self.max_loss_workspace) // each.kept
        in_backward = share * free // (each.kept + each.recomputed)
        return max(1, min(at_most, int(at_loss), int(in_backward)))
