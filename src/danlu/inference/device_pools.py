"""The cache of a decoder with layers on several devices of one process: each layer's on its own device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from danlu.core.layer_types import Keys, LayerCache
from danlu.inference.paged import PagedAttention
from danlu.inference.pool import CachePool
from danlu.inference.scheduler import Plan
from danlu.models.recurrent_order import RecurrentCache, RecurrentOrder, RecurrentRuns
from danlu.planning.cache_memory import CacheKind

if TYPE_CHECKING:
    from danlu.inference.pool import Blocks


class DevicePools:
    """A `CachePool` on each device, all with the same numbers of blocks and slots; each has memory for its own layers.

    devices: of each layer, by name. Other arguments are those of `CachePool`; routes are not recorded.
    """

    routes: None = None

    def __init__(
        self,
        layers: Sequence[LayerCache],
        devices: Sequence[str],
        *,
        blocks: int,
        block: int,
        dtype: torch.dtype,
        host_blocks: int = 0,
        slots: int = 0,
        cache: CacheKind = "auto",
        newest: int = 0,
    ) -> None:
        self.blocks, self.host_blocks = blocks, host_blocks
        self._devices = tuple(devices)
        self._pools = {
            device: CachePool(
                [
                    layer if own == device else LayerCache((), layer.window)
                    for layer, own in zip(layers, devices, strict=True)
                ],
                blocks=blocks,
                block=block,
                dtype=dtype,
                device=torch.device(device),
                host_blocks=host_blocks,
                slots=slots,
                cache=cache,
                newest=newest,
            )
            for device in dict.fromkeys(devices)
        }

    def allocate(self) -> None:
        """Allocates the pools of all devices, as `CachePool.allocate`."""
        for pool in self._pools.values():
            pool.allocate()

    def release(self) -> None:
        """Releases the pools of all devices, as `CachePool.release`."""
        for pool in self._pools.values():
            pool.release()

    def carry_out(self, plan: Plan) -> None:
        """Carries out the plan on each device, as `CachePool.carry_out`."""
        for pool in self._pools.values():
            pool.carry_out(plan)

    def attend(self, plan: Plan) -> AttentionByDevice:
        """Attention of the plan's chunks, laid end to end, of each layer over the cache on its device."""
        return AttentionByDevice({device: pool.attend(plan) for device, pool in self._pools.items()}, self._devices)

    def tensors(self, layer: int) -> tuple[Blocks, ...]:
        """Returns a layer's tensors, as `CachePool.tensors`."""
        return self._pools[self._devices[layer]].tensors(layer)


class AttentionByDevice:
    """The attention of each device for the layers on it; satisfies `danlu.core.layer_types.Attend`."""

    def __init__(self, attends: Mapping[str, PagedAttention], devices: Sequence[str]) -> None:
        self._attends, self._devices = attends, devices

    @cached_property
    def runs(self) -> RecurrentRuns:
        """The recurrent runs of layers with a state: they continue from the cached states on their devices."""
        of_devices = {device: attend.runs for device, attend in self._attends.items() if attend.pool.states is not None}
        first = next(iter(of_devices.values()))
        assert first.caches is not None, "in a rollout states are cached"
        caches = [
            _CacheByDevice(
                each.tokens, each.order, {device: _cache(runs, n) for device, runs in of_devices.items()}, self._devices
            )
            for n, each in enumerate(first.caches)
        ]
        return RecurrentRuns(first.order, caches)

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        keys: Keys,  # of the same tokens
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [T, H, W]
        attend = self._attends[self._devices[layer]]
        return attend(layer, q, keys, scale=scale, window=window, softcap=softcap, sinks=sinks)


def _cache(runs: RecurrentRuns, number: int) -> RecurrentCache:
    assert runs.caches is not None, "such devices cache states"
    return runs.caches[number]


@dataclass(frozen=True)
class _CacheByDevice:
    """The states that some chunks of a plan continue, of each layer on its device; satisfies `RecurrentCache`."""

    tokens: slice
    order: RecurrentOrder | None
    caches: Mapping[str, RecurrentCache]
    devices: Sequence[str]

    def read(self, layer: int) -> Sequence[Tensor]:
        """The states before the chunks; zeros where a sequence begins."""
        return self.caches[self.devices[layer]].read(layer)

    def write(self, layer: int, *states: Tensor) -> None:
        """Keeps the states behind the chunks."""
        self.caches[self.devices[layer]].write(layer, *states)
