"""One action of a pipeline rank, and counts over a list of actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input", "weight", "send", "receive", "reduce", "update"]


class Action(NamedTuple):
    """The next action of a rank. Only the fields that a kind needs are set; the others are None.

    ============  =====  =====  ====  =====================================================================
    kind          chunk  micro  peer  meaning
    ============  =====  =====  ====  =====================================================================
    ``forward``   yes    yes          the chunk's forward pass; of the last chunk, with the loss
    ``backward``  yes    yes          the whole backward pass: gradients of the chunk's input and weights
    ``input``     yes    yes          the gradient of the chunk's input alone (B in zero-bubble papers)
    ``weight``    yes    yes          the weight gradients that this micro-batch's ``input`` put off (W)
    ``send``      yes    yes    yes   sends what `what` says to rank `peer`
    ``receive``   yes    yes    yes   receives it from rank `peer`
    ``reduce``    yes    (1)          sums the chunk's gradients over data ranks; all of them are complete
    ``update``           (1)          the optimizer's step, for all chunks of the rank
    ============  =====  =====  ====  =====================================================================

    (1) The micro-batch where a step is one micro-batch (PipeDream); None where the step is the whole list.

    `chunk` is always one of the rank's own: a sent activation is the output of `chunk`, a received one its input; a
    sent gradient is that of the input of `chunk`, a received one that of its output. An executor may wait at a
    ``receive``, or start it there and wait where the tensor is used: the lists allow both.
    """

    kind: Kind
    chunk: int | None = None
    """Number of the chunk in the whole model: chunk 0 has the embedding, the last one the head."""
    micro: int | None = None
    """Number of the micro-batch in the step."""
    peer: int | None = None
    """The pipeline rank at the other end of a message: an index along the pipeline axis, no global rank."""
    what: Literal["activation", "gradient"] | None = None
    """The content of a message.

    It does not follow from the ranks: in a V-shaped placement activations of the first half and gradients of the second
    go the same way, between the same two ranks.
    """

    def __str__(self) -> str:
        """The action in words, for messages about hangs and deadlocks."""
        match self.kind:
            case "send":
                return f"send the {self.what} of micro-batch {self.micro} from chunk {self.chunk} to rank {self.peer}"
            case "receive":
                return (
                    f"receive the {self.what} of micro-batch {self.micro} for chunk {self.chunk} from rank {self.peer}"
                )
            case "reduce":
                return f"sum the gradients of chunk {self.chunk}{self._of_micro()} over data ranks"
            case "update":
                return f"update the weights{self._of_micro()}"
        gradient = {"input": "input gradient", "weight": "weight gradient"}.get(self.kind, self.kind)
        return f"{gradient} of micro-batch {self.micro} in chunk {self.chunk}"

    def _of_micro(self) -> str:
        return "" if self.micro is None else f" after micro-batch {self.micro}"


def peak_in_flight(actions: Iterable[Action]) -> int:
    """Returns the largest number of (chunk, micro-batch) pairs that a rank keeps activations of at once.

    A pair is in flight from its forward pass until its weight gradients are computed, since a put-off weight gradient
    still needs the inputs of its layers.
    """
    count = peak = 0
    for action in actions:
        if action.kind == "forward":
            count += 1
            peak = max(peak, count)
        elif action.kind in ("backward", "weight"):
            count -= 1
    return peak


def forwards_only(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Returns the forward passes of a rank's list and their messages, in the same order, as an evaluation runs them."""
    return tuple(action for action in actions if action.kind == "forward" or action.what == "activation")
