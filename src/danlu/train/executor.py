"""Carries out what one process does in a step or an evaluation: the list of actions that a schedule has made for it.

Training, evaluation and `danlu verify` all go through here, on one process (forward 0, backward 0, forward 1, ..) as on
the ranks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from danlu.parallel.pipeline import Messages
from danlu.parallel.schedules import Action
from danlu.parallel.watchdog import PHASE
from danlu.train.learner import Activation, Learner, MicroStep, StepItems
from danlu.types import Loss
from danlu.weight_gradients import DeferredWeightGradients

AnyLearner = Learner[Any, Any]
Place = tuple[int, int]  # (chunk, micro-batch)


class Executor:
    """One process's chunks of a model, and what is in flight between their forward and backward passes.

    Args:
        items: whose micro-batches are made when the first action needs them, and dropped after the last.
        on_loss: is given the loss of each micro-batch whose last chunk is here.
        on_backward: is called with the number of a micro-batch after each backward pass of it, and each weight pass.
    """

    def __init__(
        self,
        learner: AnyLearner,
        items: StepItems,
        on_loss: Callable[[Loss], None] = lambda loss: None,
        on_backward: Callable[[int], None] = lambda micro: None,
    ) -> None:
        self._learner, self._items = learner, items
        self._on_loss, self._on_backward = on_loss, on_backward
        self._messages = Messages(learner.parallel.pipeline)
        self._micro_steps: dict[int, MicroStep[Any]] = {}
        self._inputs: dict[Place, Tensor] = {}  # of chunks whose input is another's output: leaves of autograd
        self._outputs: dict[Place, Tensor] = {}  # with their graphs: activations, of the last chunk the loss
        # What passes between a chunk and the next, until it is used or sent: functions wait for what is received.
        self._activations: dict[Place, Callable[[], Activation]] = {}  # by the chunk that it goes into
        self._gradients: dict[Place, Callable[[], Activation]] = {}  # of `_outputs`, by their chunk: one tensor
        self._deferred: dict[Place, DeferredWeightGradients] = {}  # of what has an input pass, from its forward pass on

    def run(self, actions: Sequence[Action]) -> None:
        """Does what the list says, in its order; gradients are sums over all micro-batches and processes then.

        `update` is left to the caller, who has to see the gradients of all processes before.
        """
        last_use = {action.micro: number for number, action in enumerate(actions)}
        last_gradients = {  # of each chunk
            action.chunk: number for number, action in enumerate(actions) if action.kind in ("backward", "weight")
        }
        reduces = [number for number, action in enumerate(actions) if action.kind == "reduce"]
        self._deferred = {
            (chunk, micro): DeferredWeightGradients()
            for action in actions
            if (chunk := action.chunk) is not None and (micro := action.micro) is not None and action.kind == "input"
        }
        for number, action in enumerate(actions):
            match action:
                case Action(kind="forward", chunk=int(chunk), micro=int(micro)):
                    self._forward((chunk, micro))
                case Action(kind="backward", chunk=int(chunk), micro=int(micro)):
                    self._learner.parallel.prepare_backward(number == last_gradients[chunk], chunk)
                    self._backward((chunk, micro))
                    self._on_backward(micro)
                case Action(kind="input", chunk=int(chunk), micro=int(micro)):
                    self._learner.parallel.prepare_backward(False, chunk)
                    self._backward((chunk, micro))
                case Action(kind="weight", chunk=int(chunk), micro=int(micro)):
                    PHASE.begin("weight gradients")
                    self._deferred.pop((chunk, micro)).accumulate()
                    self._learner.parallel.finish_weight_pass(number == last_gradients[chunk], chunk)
                    self._on_backward(micro)
                case Action(kind="send", chunk=int(chunk), micro=int(micro), what="activation"):
                    self._messages.send(action, self._activations.pop((chunk + 1, micro))())
                case Action(kind="send", chunk=int(chunk), micro=int(micro), what="gradient"):
                    self._messages.send(action, self._gradients.pop((chunk - 1, micro))())
                case Action(kind="receive", chunk=int(chunk), micro=int(micro), what="activation"):
                    into = self._learner.empty_activation(self._micro_step(micro))
                    self._activations[chunk, micro] = self._messages.receive(action, into)
                case Action(kind="receive", chunk=int(chunk), micro=int(micro), what="gradient"):
                    into = (torch.empty_like(self._outputs[chunk, micro]),)
                    self._gradients[chunk, micro] = self._messages.receive(action, into)
                case Action(kind="reduce"):
                    if number == reduces[-1]:  # of all chunks together
                        PHASE.begin("sum of gradients")
                        self._learner.parallel.reduce_gradients()
                case Action(kind="update"):
                    assert number == len(actions) - 1, "one update for all micro-batches"
                case _:
                    raise AssertionError(f"no process of this layout is to {action}")
            if action.micro is not None and last_use[action.micro] == number:
                del self._micro_steps[action.micro]
        self._messages.finish()

    def _micro_step(self, micro: int) -> MicroStep[Any]:
        if micro not in self._micro_steps:
            self._micro_steps[micro] = self._items.micro_step(self._learner, micro)
        return self._micro_steps[micro]

    def _forward(self, place: Place) -> None:
        chunk, micro = place
        micro_step, activations = self._micro_step(micro), self._learner.activations
        trains = micro_step.step is not None
        x = None
        if (arrived := self._activations.pop(place, None)) is not None:
            x = arrived()
            x[0].requires_grad_(trains)
        if trains:
            PHASE.begin("forward", micro_step.step)
        counted = activations.counted(len(micro_step.batch.targets)) if trains and activations else nullcontext()
        with self._learner.at(micro_step), counted, self._deferring(place):
            output = self._learner.forward(chunk, micro_step, x)
        if isinstance(output, Loss):
            self._on_loss(output)
        else:
            activation = tuple(hidden.detach() for hidden in output)
            self._activations[chunk + 1, micro] = lambda: activation
        if trains:
            self._outputs[place] = output.total if isinstance(output, Loss) else output[0]
            if x is not None:
                self._inputs[place] = x[0]

    def _backward(self, place: Place) -> None:
        chunk, micro = place
        gradient = self._gradients.pop(place)()[0] if place in self._gradients else None
        PHASE.begin("backward")
        output = self._outputs.pop(place)
        with self._learner.at(self._micro_steps[micro]), self._deferring(place):
            if gradient is None or output.requires_grad:  # not so of a first chunk in which nothing is trained
                torch.autograd.backward(output, gradient)
        x = self._inputs.pop(place, None)
        if x is not None:
            grad = x.grad
            assert grad is not None, "what a chunk makes depends on what it is given"
            self._gradients[chunk - 1, micro] = lambda: (grad,)

    def _deferring(self, place: Place) -> AbstractContextManager[None]:
        """Around both passes where the second is an input pass: gradients of weights are put off."""
        deferred = self._deferred.get(place)
        return nullcontext() if deferred is None else deferred.active()
