"""States that layers keep of a sequence as a whole, such as that of linear attention: a slot for each that runs.

A state changes with each token and is not kept for the tokens before. So it is shared by copies alone (when a prompt is
read, by all its answers), and read again from the beginning after a preemption.

T tokens of a pass, flat
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.layer_types import LayerCache
from danlu.inference.scheduler import Chunk, Plan
from danlu.models.recurrent_order import RecurrentOrder, RecurrentRuns


class StatePool:
    """Slots of states of all layers; the old content of a slot that a sequence begins in is never read."""

    def __init__(self, layers: Sequence[LayerCache], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self._layers = [
            tuple(torch.zeros(slots, *shape, dtype=each, device=device) for shape, each in _typed(layer, dtype))
            for layer in layers
        ]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies states from slot to slot, (from, to) each; no slot is both."""
        source, target = (copy_to(torch.tensor(slots), self.device) for slots in zip(*copies, strict=True))
        for tensors in self._layers:
            for states in tensors:
                states.index_copy_(0, target, states.index_select(0, source))

    def runs(self, plan: Plan) -> RecurrentRuns:
        """The recurrent runs of a plan's chunks, laid end to end: they continue from the states of their sequences."""
        single = [chunk for chunk in plan.chunks if chunk.stop - chunk.start == 1]
        assert list(plan.chunks[: len(single)]) == single, "chunks of one token come first"
        several = plan.chunks[len(single) :]
        boundaries = [0]
        for chunk in plan.chunks:
            boundaries.append(boundaries[-1] + chunk.stop - chunk.start)
        caches = []
        if single:
            caches.append(_CachedStates(self, single, slice(0, len(single)), None))
        if several:
            first = boundaries[len(single)]
            order = RecurrentOrder([boundary - first for boundary in boundaries[len(single) :]])
            caches.append(_CachedStates(self, several, slice(first, boundaries[-1]), order))
        return RecurrentRuns(RecurrentOrder(boundaries), tuple(caches))

    def read(self, layer: int, slots: Tensor, beginning: Tensor | None) -> tuple[Tensor, ...]:
        """[slots, *shape] of each of the layer's states, copied; zeros at the places in `beginning`."""
        states = tuple(tensor.index_select(0, slots) for tensor in self._layers[layer])
        if beginning is not None:
            for each in states:
                each.index_fill_(0, beginning, 0)
        return states

    def write(self, layer: int, slots: Tensor, states: Sequence[Tensor]) -> None:
        """Writes the layer's states, [slots, *shape] each."""
        for tensor, new in zip(self._layers[layer], states, strict=True):
            tensor.index_copy_(0, slots, new.to(tensor.dtype))


class _CachedStates:
    """The states that some chunks of a plan continue; satisfies `models.recurrent_order.RecurrentCache`."""

    def __init__(self, pool: StatePool, chunks: Sequence[Chunk], tokens: slice, order: RecurrentOrder | None) -> None:
        self._pool, self._chunks, self.tokens, self.order = pool, chunks, tokens, order

    def read(self, layer: int) -> tuple[Tensor, ...]:
        """The states before the chunks; zeros where a sequence begins."""
        return self._pool.read(layer, self._slots, self._beginning)

    def write(self, layer: int, *states: Tensor) -> None:
        """Keeps the states behind the chunks."""
        self._pool.write(layer, self._slots, states)

    @cached_property
    def _slots(self) -> Tensor:
        return copy_to(torch.tensor([chunk.slot for chunk in self._chunks]), self._pool.device)

    @cached_property
    def _beginning(self) -> Tensor | None:
        places = [place for place, chunk in enumerate(self._chunks) if chunk.start == 0]
        return copy_to(torch.tensor(places), self._pool.device) if places else None


def _typed(layer: LayerCache, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each of a layer's states: activations, and last of all sums over all tokens."""
    last = len(layer.states) - 1
    return [(shape, torch.float32 if place == last else dtype) for place, shape in enumerate(layer.states)]
