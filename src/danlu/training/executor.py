"""Executes the actions of one process in a step or an evaluation: the list that a schedule has made for it.

Training, evaluation and `danlu verify` all go through here, on one process (forward 0, backward 0, forward 1, ..) as on
the ranks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from danlu.core.types import Loss
from danlu.core.weight_gradients import DeferredWeightGradients
from danlu.parallel.phase import PHASE
from danlu.parallel.pipeline import Messages
from danlu.parallel.schedules import Action
from danlu.parallel.schedules.action import Kind
from danlu.training.learner import Activation, Learner, MicroStep, MicroSteps

AnyLearner = Learner[Any, Any]
Place = tuple[int, int]  # (chunk, micro-batch)
Timed = Callable[[Kind, int | None, int | None], AbstractContextManager[None]]


def untimed(kind: Kind, chunk: int | None, micro: int | None) -> AbstractContextManager[None]:
    """A context around an action that nobody times."""
    return nullcontext()


class Executor:
    """One process's chunks of a model, and the tensors in flight between their forward and backward passes.

    Args:
        micro_steps: the micro-batches, each made for its first action, and dropped after its last.
        on_loss: is given the loss of each micro-batch, where its last chunk is here.
        on_backward: is called with the number of a micro-batch after each backward pass of it, and each weight pass.
        on_update: is called with the number of a micro-batch where the list has the update of a step that consists of
            it alone.
        weights: a context around each pass of the micro-batch of a number, in which the model has its weights.
        timed: a context around an action's computation or sum, without the wait before; it is given kind, chunk and
            micro-batch.
    """

    def __init__(
        self,
        learner: AnyLearner,
        micro_steps: MicroSteps,
        on_loss: Callable[[Loss], None] = lambda loss: None,
        on_backward: Callable[[int], None] = lambda micro: None,
        on_update: Callable[[int], None] | None = None,
        weights: Callable[[int], AbstractContextManager[None]] = lambda micro: nullcontext(),
        timed: Timed = untimed,
    ) -> None:
        self._learner, self._source = learner, micro_steps
        self._on_loss, self._on_backward, self._on_update = on_loss, on_backward, on_update
        self._weights, self._timed = weights, timed
        self._ended = False  # no more micro-batches begin
        pipeline = learner.parallel.pipeline
        self._messages = None if pipeline is None else Messages(pipeline)
        self._micro_steps: dict[int, MicroStep[Any]] = {}
        self._inputs: dict[Place, Activation] = {}  # of chunks that read another's output: leaves of autograd
        self._outputs: dict[Place, Activation] = {}  # with their graphs: what is trained; of the last chunk the loss
        # What passes between a chunk and the next, until it is used or sent: functions wait for what is received.
        self._activations: dict[Place, Callable[[], Activation]] = {}  # by the chunk that it goes into
        self._gradients: dict[Place, Callable[[], Activation]] = {}  # of `_outputs`, by their chunk
        self._deferred: dict[Place, DeferredWeightGradients] = {}  # of what has an input pass, from its forward pass on

    def run(self, actions: Sequence[Action]) -> None:
        """Executes the actions in their order; afterwards gradients are sums over all micro-batches and processes.

        The `update` of the whole list is left to the caller, who has to see the gradients of all processes before.
        Where each micro-batch has one of its own, gradients are those of this micro-batch when `on_update` is called,
        which takes them away.
        """
        last_use = {action.micro: number for number, action in enumerate(actions)}
        each_updates = any(action.kind == "update" and action.micro is not None for action in actions)
        last_gradients = {  # of each chunk in a step
            (action.chunk, action.micro if each_updates else None): number
            for number, action in enumerate(actions)
            if action.kind in ("backward", "weight")
        }
        last_reduce = {action.micro: number for number, action in enumerate(actions) if action.kind == "reduce"}

        def is_last(number: int, chunk: int, micro: int) -> bool:
            return number == last_gradients[chunk, micro if each_updates else None]

        self._deferred = {
            (chunk, micro): DeferredWeightGradients()
            for action in actions
            if (chunk := action.chunk) is not None and (micro := action.micro) is not None and action.kind == "input"
        }
        for number, action in enumerate(actions):
            if not self._has_begun(action.micro):
                continue
            match action:
                case Action(kind="forward", chunk=int(chunk), micro=int(micro)):
                    self._forward((chunk, micro))
                case Action(kind="backward", chunk=int(chunk), micro=int(micro)):
                    self._learner.parallel.prepare_backward(is_last(number, chunk, micro), chunk)
                    self._backward((chunk, micro))
                    self._on_backward(micro)
                case Action(kind="input", chunk=int(chunk), micro=int(micro)):
                    self._learner.parallel.prepare_backward(False, chunk)
                    self._backward((chunk, micro))
                case Action(kind="weight", chunk=int(chunk), micro=int(micro)):
                    PHASE.begin("weight gradients")
                    with self._timed("weight", chunk, micro):
                        self._deferred.pop((chunk, micro)).accumulate()
                    self._learner.parallel.finish_weight_pass(is_last(number, chunk, micro), chunk)
                    self._on_backward(micro)
                case Action(kind="send" | "receive", chunk=int(chunk), micro=int(micro)):
                    self._exchange(action, chunk, micro)
                case Action(kind="reduce", micro=micro):
                    if number == last_reduce[micro]:  # of all chunks together
                        PHASE.begin("sum of gradients")
                        with self._timed("reduce", action.chunk, micro):
                            self._learner.parallel.reduce_gradients()
                case Action(kind="update", micro=int(micro)):
                    assert self._on_update is not None, "what updates within the list has somebody who does it"
                    PHASE.begin("optimizer")
                    self._on_update(micro)
                case Action(kind="update"):
                    assert number == len(actions) - 1, "one update for all micro-batches"
                case _:
                    raise AssertionError(f"no process of this layout is to {action}")
            if action.micro is not None and last_use[action.micro] == number:
                del self._micro_steps[action.micro]
        if self._messages is not None:
            self._messages.finish()

    def _exchange(self, action: Action, chunk: int, micro: int) -> None:
        """Starts to send or to receive the tensors that pass between two chunks for a micro-batch."""
        assert self._messages is not None, "only processes of a pipeline exchange messages"
        match action.kind, action.what:
            case "send", "activation":
                self._messages.send(action, self._activations.pop((chunk + 1, micro))())
            case "send", _:
                self._messages.send(action, self._gradients.pop((chunk - 1, micro))())
            case _, "activation":
                into = self._learner.empty_activation(self._micro_steps[micro])
                self._activations[chunk, micro] = self._messages.receive(action, into)
            case _:
                into = tuple(map(torch.empty_like, self._outputs[chunk, micro]))
                self._gradients[chunk, micro] = self._messages.receive(action, into)

    def _has_begun(self, micro: int | None) -> bool:
        """Whether a micro-batch is there, from its first action on; of no micro-batch True."""
        if micro is None or micro in self._micro_steps:
            return True
        # All micro-batches that begin after the first that is not there are left out, on all processes alike.
        micro_step = None if self._ended else self._source.micro_step(self._learner, micro)
        if micro_step is None:
            self._ended = True
            return False
        self._micro_steps[micro] = micro_step
        return True

    def _forward(self, place: Place) -> None:
        chunk, micro = place
        micro_step, activations = self._micro_steps[micro], self._learner.activations
        trains = micro_step.step is not None
        x = None
        if (arrived := self._activations.pop(place, None)) is not None:
            x = arrived()
            for hidden in x[: self._learner.trained_activations] if trains else ():
                hidden.requires_grad_()
        if trains:
            PHASE.begin("forward", micro_step.step)
        counted = activations.counted(len(micro_step.batch.targets)) if trains and activations else nullcontext()
        timed = self._timed("forward", chunk, micro)
        with timed, self._weights(micro), self._learner.at(micro_step), counted, self._deferring(place):
            output = self._learner.forward(chunk, micro_step, x)
        if isinstance(output, Loss):
            self._on_loss(output)
        else:
            activation = tuple(hidden.detach() for hidden in output)
            self._activations[chunk + 1, micro] = lambda: activation
        if trains:
            if isinstance(output, Loss):
                self._outputs[place] = (output.total,)
            else:
                self._outputs[place] = output[: self._learner.trained_activations]
            if x is not None:
                self._inputs[place] = x[: self._learner.trained_activations]

    def _backward(self, place: Place) -> None:
        chunk, micro = place
        gradients = self._gradients.pop(place)() if place in self._gradients else None
        PHASE.begin("backward")
        outputs = self._outputs.pop(place)
        timed = self._timed("input" if place in self._deferred else "backward", chunk, micro)
        with timed, self._weights(micro), self._learner.at(self._micro_steps[micro]), self._deferring(place):
            if gradients is None:
                torch.autograd.backward(outputs)
            else:
                # Not so of a first chunk in which nothing is trained.
                pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
                if pairs:
                    torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        inputs = self._inputs.pop(place, None)
        if inputs is not None:
            grads = tuple(x.grad for x in inputs if x.grad is not None)
            assert len(grads) == len(inputs), "what a chunk makes depends on what it is given"
            self._gradients[chunk - 1, micro] = lambda: grads

    def _deferring(self, place: Place) -> AbstractContextManager[None]:
        """A context around both passes where the second is an input pass: gradients of weights are put off."""
        deferred = self._deferred.get(place)
        return nullcontext() if deferred is None else deferred.active()
