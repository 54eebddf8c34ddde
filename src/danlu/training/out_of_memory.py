"""Recognising errors that say that memory ran out: CUDA's allocator, the CPU's and Python's each raise their own."""

from __future__ import annotations

import re

import torch

from danlu.core.errors import ResourceError
from danlu.parallel.phase import PHASE
from danlu.training.units import format_bytes

# What torch and CUDA's libraries say in errors that have no class of their own.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate|CUDA out of memory|CUDA error: out of memory"
    r"|cudaErrorMemoryAllocation|(CUBLAS|CUSOLVER|CUDNN)_STATUS_ALLOC_FAILED|NCCL.*out of memory",
)
_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class OutOfMemory(ResourceError):
    """A step that was given up because memory ran out, with everything put back that a checkpoint would keep of it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocator had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def requested_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed; None where the error does not say."""
    match = _REQUESTED.search(str(error))
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def out_of_memory_message(error: BaseException) -> str:
    """`step 12, backward: out of memory when 1.50 GiB more were asked for`; the message of an OutOfMemory."""
    if isinstance(error, OutOfMemory):
        return str(error)
    requested = requested_bytes(error)
    where = ", ".join(part for part in ("" if PHASE.step is None else f"step {PHASE.step}", PHASE.phase) if part)
    more = "" if requested is None else f" when {format_bytes(requested)} more were asked for"
    return f"{where}: out of memory{more}" if where else f"out of memory{more}"
