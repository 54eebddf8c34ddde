"""Backward passes that are split into an input and a weight pass, pass by pass, and what each of them costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from danlu.core.weight_gradients import DeferredWeightGradients

Forward = Callable[[], Tensor]
"""The forward pass of a micro-batch: its loss."""

WHOLE = "F0 B0 F1 B1 F2 B2"
SPLIT = "F0 I0 F1 I1 W0 F2 I2 W1 W2"
"""As on the last but one rank of ZB-H1: a weight pass runs one micro-batch behind."""


@dataclass(frozen=True)
class Passes:
    """What some passes came to."""

    gradients: dict[str, Tensor]
    left: frozenset[str]  # parameters whose gradients were left to a weight pass
    flops: dict[str, int]  # of matrix products, by kind of pass
    kept_bytes: int  # the most that was kept for weight passes


def run_passes(
    order: str,
    forwards: Sequence[Forward],
    begin: Callable[[int], None],
    parameters: Mapping[str, Tensor],
    *,
    counts_flops: bool = False,
) -> Passes:
    """Goes through `F0 I0 W0 ..`: forward, backward, input and weight passes, each with its micro-batch.

    A whole backward pass (B) follows a forward pass without a queue, an input pass one with it. Gradients are those of
    all of `parameters` that have one, which are left without.

    Args:
        begin: brings the model into the state of a micro-batch, before each forward, backward and input pass of it.
        counts_flops: which takes several times as long.
    """
    split = {action[1:] for action in order.split() if action[0] == "I"}
    queues: dict[str, DeferredWeightGradients] = {}
    losses: dict[str, Tensor] = {}
    left: set[str] = set()
    flops = dict.fromkeys("FBIW", 0)
    kept = 0
    for kind, micro in ((action[0], action[1:]) for action in order.split()):
        if kind == "F" and micro in split:
            queues[micro] = DeferredWeightGradients()
        if kind != "W":
            begin(int(micro))
        with FlopCounterMode(display=False) if counts_flops else nullcontext() as counter:
            match kind:
                case "F":
                    with queues[micro].active() if micro in split else nullcontext():
                        losses[micro] = forwards[int(micro)]()
                case "B":
                    losses.pop(micro).backward()
                case "I":
                    with queues[micro].active():
                        losses.pop(micro).backward()
                    left |= {name for name, tensor in parameters.items() if tensor in queues[micro].weights}
                    kept = max(kept, sum(queue.kept_bytes for queue in queues.values()))
                case "W":
                    queues.pop(micro).accumulate()
        flops[kind] += 0 if counter is None else counter.get_total_flops()
    gradients = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
    for tensor in parameters.values():
        tensor.grad = None
    return Passes(gradients, frozenset(left), flops, kept)


def same_bits(first: Passes, second: Passes) -> bool:
    """Whether both have gradients of the same parameters, bit for bit."""
    assert first.gradients.keys() == second.gradients.keys() and first.gradients
    return all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)
