"""The most memory that tensors take within a call, as torch's profiler counts it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_FIRST_BYTES = 1009  # of a tensor of a size that no other has


def peak_in(step: Any) -> int:
    """The most bytes that were allocated at once within a call, beside what was there before.

    By the allocator's own count after each change. To sort changes by their times and add them up would do only on a
    quiet machine: the clocks of two cores may differ, and a process goes from one to the other.
    """
    # Models of earlier tests wait in cycles for the collector: freed in the midst of it, they would lower the peak.
    gc.collect()
    gc.freeze()  # so that the next call need not look at the same again
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            torch.empty(_FIRST_BYTES, dtype=torch.uint8)
            step()
    finally:
        gc.enable()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None, "it has ended"
    changes = list(_changes(profiled.profiler.kineto_results.experimental_event_tree()))
    (before,) = {total - size for size, total in changes if size == _FIRST_BYTES}
    return max(total for _, total in changes) - before


def _changes(events: Any) -> Iterator[tuple[int, int]]:
    """Bytes of each allocation (below 0: of what is freed), and of all that is allocated after it."""
    for event in events:
        kind, fields = event.typed
        if kind.name == "Allocation":
            yield fields.alloc_size, fields.total_allocated
        yield from _changes(event.children)
