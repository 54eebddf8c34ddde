"""Python runs this first where the folder is on its path: the third step of `danlu train` is profiled.

Each process writes the most bytes that tensors took in that step, beside what was there before, to
DANLU_ALLOCATION.RANK. torch's allocator does not see pages of the program's own, so gradients stay in its memory.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

STEP = 3


class Hook:
    """Changes a module of danlu as soon as it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "danlu.training.loop":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _profile(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _profile(loop: Any) -> None:
    from danlu.training import gradient_memory

    gradient_memory.move_out_of_the_heap = lambda parameters: None
    accumulate, calls = loop.accumulate, [0]

    def profiled(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != STEP:
            return accumulate(*args, **kwargs)
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled_step:
            result = accumulate(*args, **kwargs)
        tree = profiled_step.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
        file = f"{os.environ['DANLU_ALLOCATION']}.{os.environ.get('RANK', '0')}"
        with open(file, "w", encoding="utf-8") as out:
            out.write(str(_most_allocated(tree)))
        return result

    loop.accumulate = profiled


def _most_allocated(tree: Any) -> int:
    """Returns the most bytes that tensors made in the step take at once.

    The profiler does not see what other threads free, such as gloo's, which drop the tensors of a collective when it
    has ended: its own sum of bytes never comes down from these (1.2 times as much with two tensor ranks). Their memory
    is given to the next tensor of that size, so a tensor at an address that is taken replaces the one that was there.
    """
    sizes: dict[int, int] = {}  # by address
    total = most = 0
    for _, address, size in sorted(_allocations(tree)):
        total -= sizes.pop(address, 0)
        if size > 0:
            sizes[address] = size
            total += size
            most = max(most, total)
    return most


def _allocations(events: Any) -> Iterator[tuple[int, int, int]]:
    """Yields (nanoseconds, address, bytes) of each allocation; the bytes of one that is freed are negative."""
    for event in events:
        kind, fields = event.typed
        if kind.name == "Allocation":
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from _allocations(event.children)


if "DANLU_ALLOCATION" in os.environ:
    sys.meta_path.insert(0, Hook())  # type: ignore[arg-type]
