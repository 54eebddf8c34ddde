"""A process group of threads, for operations that need collectives but no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ThreadGroup:
    """A group of threads in step with each other, each with a shard of the vocabulary."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def _reduced(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        self.slots[threading.get_ident()] = x.clone()
        self.barrier.wait()
        x.copy_(reduce(torch.stack(list(self.slots.values()))))
        self.barrier.wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._reduced(x.clone(), lambda parts: gathered.copy_(parts.flatten(0, 1))[: x.shape[0]])
        return gathered

    def sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, lambda parts: parts.sum(0))

    def max(self, x: Tensor) -> Tensor:
        return self._reduced(x, lambda parts: parts.amax(0))
