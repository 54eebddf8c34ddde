"""Versions of a stage's weights that PipeDream's micro-batches in flight still use (arXiv:1806.03377, section 3.3).

Each micro-batch is a step; its update comes while others are between their forward and their backward pass. Both passes
of a micro-batch use one version of the weights, or its gradient would be that of no function. Version v has the updates
of micro-batches 0 to v - 1 since the last flush.

With p stages, stage r of which (from 0) has p - r micro-batches in flight, micro-batch t uses there version

    t - (p - 1 - r)    the newest when its forward pass begins (weight stashing)
    t - (p - 1)        that of the first stage, on all of them (vertical sync)

and version 0 where this is less. `Pipeline.weight_delay` is subtracted from t.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class _Weights:
    """The trained parameters of a stage at one time: their memory, and autograd's counters of changes in it."""

    data: tuple[Tensor, ...]
    counters: tuple[int, ...]


class WeightStash:
    """The versions of trained weights on one stage, between two flushes.

    An update changes weights in place. Where later passes need the version before it, this version keeps its memory,
    and the parameters get new memory with the same values before they are updated. So no more versions are there at a
    time than are needed: at most min(m, delay + 1) of m micro-batches, the newest included.

    Autograd saves some weights as the parameters that they are, others as views of their memory; functions of ours and
    recomputation read parameters once more. A version that is put in place is seen by all of them. Its counters come
    with it, so autograd still finds out where a backward pass would see another version than its forward pass.

    Args:
        parameters: those that are trained.
        micro_batches: the most that there may be until the next flush.
        delay: of how many micro-batches right before it a micro-batch does not have the updates.
    """

    def __init__(self, parameters: Iterable[Parameter], micro_batches: int, delay: int) -> None:
        self._parameters = tuple(parameters)
        self._last, self._delay = micro_batches - 1, delay
        self._newest = 0
        self._stashed: dict[int, _Weights] = {}

    @property
    def num_versions(self) -> int:
        """The number of versions, the newest included."""
        return len(self._stashed) + 1

    def version_of(self, micro: int) -> int:
        """The version that both passes of a micro-batch use."""
        return max(0, micro - self._delay)

    @contextmanager
    def in_place(self, micro: int) -> Iterator[None]:
        """Puts a micro-batch's version into the parameters for one pass, and the newest version back afterwards."""
        version = self.version_of(micro)
        if version == self._newest:
            yield
            return
        assert version in self._stashed, f"micro-batch {micro} uses version {version}, which is not there"
        newest = self._present()
        self._put(self._stashed[version])
        try:
            yield
        finally:
            self._put(newest)

    @torch.no_grad()
    def before_update(self) -> None:
        """Called before each update: keeps the version that there is where passes of later micro-batches use it."""
        next_micro, version = self._newest + 1, self._newest
        self._newest += 1
        if next_micro > self._last:
            self._stashed.clear()
            return
        lowest, highest = self.version_of(next_micro), self.version_of(self._last)
        for old in [number for number in self._stashed if number < lowest]:  # first: their memory may be used at once
            del self._stashed[old]
        if lowest <= version <= highest:
            self._stashed[version] = self._present()
            self._copy_parameters()

    def clear(self) -> None:
        """Called at a flush, when no micro-batch is in flight any more: the newest version alone is left."""
        self._stashed.clear()

    def _copy_parameters(self) -> None:
        """Gives the parameters new memory, with the same values, for the next update."""
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()

    def _present(self) -> _Weights:
        data = tuple(parameter.data for parameter in self._parameters)
        return _Weights(data, tuple(parameter._version for parameter in self._parameters))

    def _put(self, weights: _Weights) -> None:
        for parameter, data in zip(self._parameters, weights.data, strict=True):
            parameter.data = data
        torch._C._autograd._unsafe_set_version_counter(self._parameters, weights.counters)
