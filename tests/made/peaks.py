"""The most memory that tensors take within a call, as torch's profiler counts it."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_in(step: Any) -> int:
    """The most bytes that were allocated at once within a call, beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
