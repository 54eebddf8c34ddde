"""The place of a process: the collective that it has been in for longest, and the line of Python of its main thread.

torch's flight recorder knows every collective that is pending, gloo's too. It and the frames of the main thread can be
read from another thread while the main thread is stuck in C++.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

BUFFER_ENTRIES = 512
"""Collectives that the flight recorder keeps (TORCH_FR_BUFFER_SIZE); those that are pending are the newest."""

_PACKAGE = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).parent
_PYTHON_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class PendingCollective:
    """A collective that a process has called and that has not ended."""

    operation: str  # all_reduce
    group: str  # torch's name of the process group
    members: tuple[int, ...]  # ranks of the group; empty where they are not known
    number: int  # of the group's collectives, in the order in which all its members call them
    input_shapes: tuple[tuple[int, ...], ...]
    elapsed_s: float  # since it was called

    @property
    def key(self) -> tuple[str, int, str]:
        """Identifies the collective: equal in all processes that wait for each other in it."""
        return self.group, self.number, self.operation

    def __str__(self) -> str:
        """``all_reduce of 3x5``"""
        shapes = ", ".join("x".join(map(str, shape)) or "one number" for shape in self.input_shapes)
        return f"{self.operation} of {shapes}" if shapes else self.operation


@dataclass(frozen=True)
class ProcessState:
    """The state that a process reports to the others while one of them hangs."""

    pending: PendingCollective | None
    phase: str  # of `watchdog.PHASE`: layers.3.mlp (backward, step 17)
    python_line: str  # as `main_thread_line` gives it

    @property
    def location(self) -> str:
        inside = f"in {self.python_line}" if self.python_line else ""
        return ", ".join(part for part in (self.phase, inside) if part) or "somewhere"

    def encode(self) -> str:
        return json.dumps(asdict(self))


def decode(text: str) -> ProcessState:
    """Decodes a state from the text that `encode` returned."""
    values = json.loads(text)
    if (pending := values["pending"]) is not None:
        pending["members"] = tuple(pending["members"])
        pending["input_shapes"] = tuple(map(tuple, pending["input_shapes"]))
        values["pending"] = PendingCollective(**pending)
    return ProcessState(**values)


def oldest_pending(
    trace: Mapping[str, Any], members: Mapping[str, tuple[int, ...]], now_ns: int
) -> PendingCollective | None:
    """The collective of a flight recorder's trace that has been pending for longest; None where none is.

    members: ranks of each process group, by torch's name of it. now_ns: nanoseconds since 1970, as in the trace.
    """
    pending = [entry for entry in trace.get("entries", ()) if not entry["retired"]]  # no such key before the first call
    if not pending:
        return None
    entry = min(pending, key=lambda entry: entry["time_created_ns"])
    group = entry["process_group"][0]
    return PendingCollective(
        operation=entry["profiling_name"].split(":")[-1],
        group=group,
        members=members.get(group, ()),
        number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        input_shapes=tuple(map(tuple, entry["input_sizes"])),
        elapsed_s=(now_ns - entry["time_created_ns"]) / 1e9,
    )


def pending_collective() -> PendingCollective | None:
    """The collective that this process has been in for longest; None while it is in none."""
    members: dict[str, tuple[int, ...]] = {
        group.group_name: tuple(sorted(ranks))
        for group, ranks in list(dist.distributed_c10d._world.pg_group_ranks.items())
        if isinstance(group, dist.ProcessGroup)  # groups that this process is no member of are numbers there
    }
    # gloo has a recorder of its own, and so has NCCL where torch comes with it.
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = filter(None, (getattr(torch._C._distributed_c10d, name, None) for name in names))
    pending = [oldest_pending(json.loads(dump()), members, time.time_ns()) for dump in dumps]
    return max(filter(None, pending), key=lambda collective: collective.elapsed_s, default=None)


def main_thread_line() -> str:
    """``take (danlu/data/stream.py:88)``: the innermost line of danlu that the main thread is in; empty for none.

    Where nothing of danlu but its command line is on the stack, the innermost line of whatever is neither torch's nor
    Python's own library.
    """
    frames = list(_stack(sys._current_frames().get(threading.main_thread().ident or 0)))
    frame = next(filter(_is_danlu, frames), None) or next((frame for frame in frames if not _is_library(frame)), None)
    if frame is None:
        return ""
    file = Path(frame.f_code.co_filename)
    shown = file.relative_to(_PACKAGE.parent) if file.is_relative_to(_PACKAGE) else file.name
    return f"{frame.f_code.co_name} ({shown}:{frame.f_lineno})"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_danlu(frame: FrameType) -> bool:
    """Whether a frame belongs to danlu's code. Frames of comm.py, which calls collectives for others, and of cli/,
    which is on every stack, do not count.
    """
    file = Path(frame.f_code.co_filename)
    return file.is_relative_to(_PACKAGE) and file.name != "comm.py" and file.parent.name != "cli"


def _is_library(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(_TORCH) or frame.f_code.co_filename.startswith(_PYTHON_LIBRARY)
