"""The parts of a run's memory: counted sizes, to compare with measured ones.

Weights, gradients and optimizer state are counted by their bytes; activations by the tensors that autograd keeps in the
first micro-batches, each storage once. Their sum is the tensors' memory at the peak of a step (on CUDA the allocator
agrees). A process on a CPU holds more: the program itself, code that the kernels generate, and freed memory that the
system's allocator keeps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.dtensor import local_tensor
from danlu.core.memory_parts import MemoryParts
from danlu.training.metrics import peak_memory_bytes
from danlu.training.units import format_bytes

_MICRO_BATCHES = 8


def memory_line(parts: MemoryParts, program: int, measured: int) -> str:
    """`memory: weights 111 MiB + adapter 2.38 MiB + ... = 299 MiB in tensors; at most 829 MiB were held, ...`.

    Args:
        parts     those of a step, counted
        program   bytes resident before there was a model, 0 on CUDA
        measured  peak bytes of the process, or of the device
    """
    named = " + ".join(f"{name} {format_bytes(value)}" for name, value in vars(parts).items() if value)
    peak = f"at most {format_bytes(measured)} were held"
    if program:
        rest = format_bytes(max(0, measured - program - parts.total))
        peak += f" (program {format_bytes(program)}, kernels and freed memory {rest})"
    return f"memory: {named} = {format_bytes(parts.total)} in tensors; {peak}"


@dataclass
class Activations:
    """Counts the bytes that autograd saves between forward and backward of a micro-batch, weights left out."""

    weights: frozenset[int]  # data pointers of storages that are no activations
    peak_bytes: int = 0  # of the micro-batch that had the most
    targets: int = 0  # of the micro-batch that had the most
    micro_batches: int = 0  # counted so far
    _saved_bytes: dict[int, int] = field(default_factory=dict)  # of the present micro-batch, by data pointer of storage

    @classmethod
    def beside(cls, tensors: Iterable[Tensor]) -> Activations:
        """A counter that leaves out `tensors`: parameters and buffers, which autograd saves without a copy."""
        local = map(local_tensor, tensors)
        return cls(frozenset(tensor.untyped_storage().data_ptr() for tensor in local))

    @contextmanager
    def counted(self, targets: int) -> Iterator[None]:
        """A context in which saved tensors are counted, for the first micro-batches; `targets`: of this one."""
        if self.micro_batches >= _MICRO_BATCHES:
            yield
            return
        self._saved_bytes = {}
        with torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor):
            yield
        self.peak_bytes = max(self.peak_bytes, sum(self._saved_bytes.values()))
        self.targets = max(self.targets, targets)
        self.micro_batches += 1

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # All-gathered by FSDP2 for a while.
        gathered = isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter)
        if storage.data_ptr() not in self.weights and not gathered:
            self._saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself would hold the graph that holds it


def resident_bytes(device: torch.device) -> int:
    """Resident bytes of the process at present; 0 on CUDA. Where the system does not say, the peak so far."""
    if device.type == "cuda":
        return 0
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return peak_memory_bytes(device)
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
