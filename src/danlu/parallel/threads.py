"""Data parallelism in one process: a replica of the model for each device, forward in threads. A mode for teaching.

It is what torch.nn.DataParallel does. Each micro-batch the weights are copied to every device, each replica takes a
share of the rows in a thread of its own, and the backward pass copies the gradients back to the first device, where
they add up. That moves twice the model's size in each micro-batch, where DDP sends gradients once a step, overlapped
with computation; all threads share one interpreter, of which one runs at a time; the first device has weights,
gradients and optimizer state for all, and nothing can be sharded. Processes (`workers: processes`) are better in every
way but one: here everything happens in one debugger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

NOTE = (
    "parallel.workers: threads: a copy of the model for each device in one process, to look at rather than to train "
    "with: Python runs one thread at a time and weights are copied in every micro-batch. `danlu train --processes N` "
    "is faster on any machine"
)


class Replicas:
    """A model on several devices; its parameters are on the first. A device may be listed more than once."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.model = model
        self.devices = tuple(devices)
        self._threads = ThreadPoolExecutor(len(devices), thread_name_prefix="replica")

    def run(self, work: Callable[[nn.Module, T], Any], shares: Sequence[T]) -> list[Any]:
        """`work(replica, share)` for each device, at the same time, in order; gradients flow back to the model."""
        replicas = [self.model, *(replica(self.model, device) for device in self.devices[1:])]
        enabled = torch.is_grad_enabled()

        def run_share(module: nn.Module, share: T) -> Any:
            with torch.set_grad_enabled(enabled):  # a setting of each thread
                return work(module, share)

        jobs = [self._threads.submit(run_share, module, share) for module, share in zip(replicas, shares, strict=True)]
        return [job.result() for job in jobs]

    def close(self) -> None:
        self._threads.shutdown()


def replica(model: nn.Module, device: torch.device) -> nn.Module:
    """The same modules over copies of the parameters on `device`; gradients flow from the copies to the originals."""
    copies: dict[Tensor, Tensor] = {}
    twins = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, twin in twins.items():
        for name, child in module._modules.items():
            if child is not None:
                twin._modules[name] = twins[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                twin._parameters[name] = None  # torch gives twins no parameters at all
            else:
                if parameter not in copies:  # tied parameters stay tied
                    copies[parameter] = parameter.to(device, copy=True)
                twin._parameters.pop(name, None)
                object.__setattr__(twin, name, copies[parameter])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                twin._buffers[name] = buffer.to(device)
    return twins[model]


def shares_of(rows: Sequence[T], count: int) -> list[Sequence[T]]:
    """Rows divided into `count` shares, in order and as evenly as can be; some may be empty."""
    return [rows[len(rows) * index // count : len(rows) * (index + 1) // count] for index in range(count)]
