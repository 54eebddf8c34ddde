"""Gradients of weights that a backward pass leaves for later: the queue between a schedule's `input` and `weight`.

A linear layer has two products in its backward pass. The layer before it waits for the gradient of its input; for that
of its weight only the optimizer waits. Zero-bubble schedules put the second off until a rank has nothing else to do
(arXiv:2401.10241, section 2). Autograd cannot split a `torch.autograd.Function`: asked for inputs and later for
weights, it runs each of them twice. So operations with a trained weight ask `deferral_of` in their forward pass. With a
queue active they hide the weight from autograd, and in their backward pass put the factors of its gradient into the
queue.

These are left to the queue: weights of linear layers and of experts, the router's, A and B of LoRA and DoRA, M of MoRA,
b of VeRA. Other gradients are sums rather than matrix products (norms, biases, embeddings, sinks, convolutions), or
made together with the input's gradient (a head over the vocabulary, where logits would have to be made once more), and
remain in the input pass.

Importing this does not import torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Gradients = Callable[..., Sequence["Tensor"]]
"""Makes the gradients of some weights of the tensors that were kept for it."""


class DeferredWeightGradients:
    """The gradients that the input pass of one micro-batch through one chunk of a model has put off, in their order.

    It keeps the inputs of layers and the gradients of their outputs, where a whole backward pass frees them as it goes.
    """

    def __init__(self) -> None:
        import torch

        self.anchor = torch.empty(0, requires_grad=True)
        """The tensor that operations give autograd in a weight's place, so that their outputs have a gradient."""
        self._entries: deque[_Entry] = deque()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Takes the gradients that are put off inside; active around a forward pass, and around its input pass.

        The input pass may recompute parts of the forward pass. It is not for code under torch.compile, which makes both
        gradients in one piece.
        """
        global _active
        before, _active = _active, self
        try:
            yield
        finally:
            _active = before

    def accumulate(self) -> None:
        """The weight pass: adds the gradients to `.grad`, and frees the tensors kept for each once it is made.

        Each weight has one sum, from the first gradient to the last, as in a backward pass that is not split: the same
        bits, and hooks on it are called once.
        """
        import torch

        missing = Counter(weight for entry in self._entries for weight in entry.weights)
        sums: dict[Tensor, Tensor] = {}
        with torch.no_grad():
            while self._entries:
                entry = self._entries.popleft()
                for weight, gradient in zip(entry.weights, entry.gradients(), strict=True):
                    sums[weight] = sums[weight] + gradient if weight in sums else gradient
                    missing[weight] -= 1
                    if not missing[weight]:
                        torch.autograd.backward(weight, sums.pop(weight))

    @property
    def weights(self) -> frozenset[Tensor]:
        """The weights with gradients that wait."""
        return frozenset(weight for entry in self._entries for weight in entry.weights)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that are kept for gradients, each storage once."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for entry in self._entries
            for tensor in entry.tensors
            for storage in (tensor.untyped_storage(),)
        }
        return sum(storages.values())

    def put_off(self, entry: _Entry) -> None:
        """Called in the input pass, see `made_or_deferred`."""
        self._entries.append(entry)


@dataclass(frozen=True)
class Deferral:
    """An operation's place in a queue, with its trained weights, which it hides from autograd."""

    queue: DeferredWeightGradients
    weights: tuple[Tensor, ...]

    @property
    def anchor(self) -> Tensor:
        """The tensor that the operation gives autograd in place of each of the weights."""
        return self.queue.anchor

    def only(self, *weights: Tensor) -> Deferral:
        """The same for some of the weights."""
        return replace(self, weights=weights)


def deferral_of(*weights: Tensor | None) -> Deferral | None:
    """Returns the queue for the gradients of an operation's trained weights; None where it makes them itself.

    That is the case without an active queue, and where a weight is computed from others: its gradient leads on to them.
    """
    if _active is None:
        return None
    trained = tuple(weight for weight in weights if weight is not None and weight.requires_grad)
    return Deferral(_active, trained) if trained and all(weight.is_leaf for weight in trained) else None


def made_or_deferred(deferral: Deferral | None, make: Gradients, *tensors: Tensor) -> Sequence[Tensor | None]:
    """Returns the gradients `make(*tensors)` of some weights in a backward pass, in their order and types; None of each
    if put off.

    Tensors are kept as they are until then, so nothing may change them in place.
    """
    if deferral is None:
        return make(*tensors)
    versions = tuple(tensor._version for tensor in tensors)
    deferral.queue.put_off(_Entry(deferral.weights, make, tensors, versions))
    return [None] * len(deferral.weights)


@dataclass(frozen=True)
class _Entry:
    weights: tuple[Tensor, ...]
    make: Gradients
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def gradients(self) -> Sequence[Tensor]:
        changed = any(tensor._version != old for tensor, old in zip(self.tensors, self.versions, strict=True))
        assert not changed, "a tensor that a weight's gradient needs was changed in place after the input pass"
        return self.make(*self.tensors)


_active: DeferredWeightGradients | None = None
"""The active queue of the process, not of a thread: on a GPU, autograd recomputes layers in a thread of its own."""
