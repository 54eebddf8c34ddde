"""Telling that memory ran out from other errors: CUDA's allocator, the CPU's, and Python's each have their own."""

from __future__ import annotations

import re

import torch

from danlu.errors import ResourceError
from danlu.parallel.watchdog import PHASE
from danlu.train.units import format_bytes

# What torch and CUDA's libraries say in errors that have no class of their own.
_SAID = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate|CUDA out of memory|CUDA error: out of memory"
    r"|cudaErrorMemoryAllocation|(CUBLAS|CUSOLVER|CUDNN)_STATUS_ALLOC_FAILED|NCCL.*out of memory",
)
_WANTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class OutOfMemory(ResourceError):
    """A step that was given up because memory ran out, with everything put back that a checkpoint would keep of it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocator had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and bool(_SAID.search(str(error)))


def wanted_bytes(error: BaseException) -> int | None:
    """How much was asked for when there was no more; None where the error does not say."""
    found = _WANTED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def in_short(error: BaseException) -> str:
    """`step 12, backward: out of memory when 1.50 GiB more were asked for`; an OutOfMemory's own words."""
    if isinstance(error, OutOfMemory):
        return str(error)
    wanted = wanted_bytes(error)
    where = ", ".join(part for part in ("" if PHASE.step is None else f"step {PHASE.step}", PHASE.phase) if part)
    more = "" if wanted is None else f" when {format_bytes(wanted)} more were asked for"
    return f"{where}: out of memory{more}" if where else f"out of memory{more}"
