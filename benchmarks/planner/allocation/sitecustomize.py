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
        import torch
        from torch.profiler import ProfilerActivity, profile

        first = 1009  # bytes of a tensor of a size that no other has
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled_step:
            torch.empty(first, dtype=torch.uint8)
            result = accumulate(*args, **kwargs)
        changes = list(_changes(profiled_step.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
        before = next(total - size for size, total in changes if size == first)
        file = f"{os.environ['DANLU_ALLOCATION']}.{os.environ.get('RANK', '0')}"
        with open(file, "w", encoding="utf-8") as out:
            out.write(str(max(total for _, total in changes) - before))
        return result

    loop.accumulate = profiled


def _changes(events: Any) -> Iterator[tuple[int, int]]:
    """Bytes of each allocation, and of all that is allocated after it."""
    for event in events:
        kind, fields = event.typed
        if kind.name == "Allocation":
            yield fields.alloc_size, fields.total_allocated
        yield from _changes(event.children)


if "DANLU_ALLOCATION" in os.environ:
    sys.meta_path.insert(0, Hook())  # type: ignore[arg-type]
