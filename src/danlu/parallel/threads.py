"""Data parallelism in one process: a replica of the model for each device, forward in threads. A teaching mode.

It is what torch.nn.DataParallel does. Each micro-batch the weights are copied to every device, each replica takes a
share of the rows in a thread of its own, and the backward pass brings the gradients of the copies back to the first
device, where they add up. That costs two copies of the model's size a micro-batch where DDP sends gradients once a step
and beside the computation; all threads share one interpreter, of which one runs at a time; the first device holds
weights, gradients and optimizer for all, and nothing can be sharded. Processes (`workers: processes`) are better in
every way but one: here everything happens in one debugger.
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
    """A model on several devices; the first is where its parameters are. A device may be named more than once."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.model = model
        self.devices = tuple(devices)
        self._threads = ThreadPoolExecutor(len(devices), thread_name_prefix="replica")

    def run(self, work: Callable[[nn.Module, T], Any], shares: Sequence[T]) -> list[Any]:
        """`work(replica, share)` for each device, at the same time; gradients of a replica lead to the model."""
        replicas = [self.model, *(replica(self.model, device) for device in self.devices[1:])]
        enabled = torch.is_grad_enabled()

        def one(module: nn.Module, share: T) -> Any:
            with torch.set_grad_enabled(enabled):  # it is a setting of each thread
                return work(module, share)

        jobs = [self._threads.submit(one, module, share) for module, share in zip(replicas, shares, strict=True)]
        return [job.result() for job in jobs]

    def close(self) -> None:
        self._threads.shutdown()


def replica(model: nn.Module, device: torch.device) -> nn.Module:
    """The same modules over copies of the parameters on another device; the copies' gradients go to the originals."""
    copies: dict[Tensor, Tensor] = {}
    modules: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        modules[module] = module._replicate_for_data_parallel()
    for module, made in modules.items():
        for name, child in module._modules.items():
            if child is not None:
                made._modules[name] = modules[child]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in copies:  # a tied one stays one
                    copies[parameter] = parameter.to(device, copy=True)
                made._parameters.pop(name, None)
                object.__setattr__(made, name, copies[parameter])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                made._buffers[name] = buffer.to(device)
    return modules[model]


def shares_of(rows: Sequence[T], count: int) -> list[Sequence[T]]:
    """Rows dealt out in order, as evenly as can be; some shares may be empty."""
    return [rows[len(rows) * place // count : len(rows) * (place + 1) // count] for place in range(count)]
