"""Processes that wait for each other without end: who waits where in which collective, and who never came, in words.

A thread of each process looks at torch's flight recorder, which knows every collective that is under way (gloo's too),
and at `PHASE`, which the model's hooks and the step keep up to date. When a collective has taken most of the time it
may, the processes put together what they see through torch's store: it answers while their main threads are stuck in
C++, which lets other threads run meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.parallel.world import format_ranks

RECORDS = 512  # collectives that the flight recorder keeps; those under way are the newest
LONGEST_WARNING_S = 60.0  # before the time is up
PACKAGE = Path(__file__).resolve().parents[1]
TORCH = Path(torch.__file__).parent
LIBRARY = sysconfig.get_path("stdlib")
DEPTH = 3  # of the modules that are marked: layers.3.mlp

_Recorder = Callable[[], str]


@dataclass
class PhaseTracker:
    """What this process's main thread is doing; written by assignment, which costs nothing, read by another thread."""

    step: int | None = None
    phase: str = ""
    module: str = ""

    def begin(self, phase: str, step: int | None = None) -> None:
        """A phase (forward, backward, optimizer, checkpoint ...), of the same step as before when none is given."""
        self.module = ""
        self.phase = phase
        if step is not None:
            self.step = step

    def enter(self, module: str) -> None:
        self.module = module

    def __str__(self) -> str:
        """``layers.3.mlp (backward, step 17)``; nothing when nobody has said anything."""
        step = "" if self.step is None else f"step {self.step}"
        if not self.module:
            return ", ".join(part for part in (self.phase, step) if part)
        inside = ", ".join(part for part in (self.phase, step) if part)
        return f"{self.module} ({inside})" if inside else self.module


PHASE = PhaseTracker()
"""Of this process."""


def track_modules(model: nn.Module, where: PhaseTracker = PHASE) -> None:
    """From now on `where.module` follows the model's layers and their halves, forward and backward.

    To be called after what torch shards or wraps: its own hooks, which gather parameters, then run inside the module
    that they gather for. Compiled code has no hooks.
    """

    def reached(name: str) -> None:
        # What a module's last part returns is its own output too, and then the part is the better word.
        if not where.module.startswith(f"{name}."):
            where.module = name

    for name, module in model.named_modules():
        if not name or name.count(".") >= DEPTH or isinstance(module, nn.ModuleDict | nn.ModuleList):
            continue

        def entered(module: nn.Module, inputs: Any, name: str = name) -> None:
            if not torch.compiler.is_compiling():
                where.module = name

        def left(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling():
                output.register_hook(lambda gradient: reached(name))

        module.register_forward_pre_hook(entered, prepend=True)
        module.register_forward_hook(left, prepend=True)


@dataclass(frozen=True)
class PendingCollective:
    """A collective that a process is in."""

    operation: str  # all_reduce
    group: str  # torch's name of it
    members: tuple[int, ...]
    number: int  # of the group's collectives, in the order that all its members make them
    sizes: tuple[tuple[int, ...], ...]  # of what goes in
    seconds: float

    @property
    def same(self) -> tuple[str, int, str]:
        """Equal in processes that wait for each other."""
        return self.group, self.number, self.operation


@dataclass(frozen=True)
class ProcessState:
    """What one process sees of itself."""

    waiting: PendingCollective | None
    where: str
    line: str  # of Python that its main thread is in

    @property
    def place(self) -> str:
        inside = f"in {self.line}" if self.line else ""
        return f"{self.where}, {inside}" if self.where and inside else self.where or inside or "somewhere"

    def encode(self) -> str:
        return json.dumps(asdict(self))


def decode(text: str) -> ProcessState:
    values = json.loads(text)
    waiting = values["waiting"]
    if waiting is not None:
        waiting |= {"members": tuple(waiting["members"]), "sizes": tuple(tuple(size) for size in waiting["sizes"])}
        values["waiting"] = PendingCollective(**waiting)
    return ProcessState(**values)


# -- what a process sees ----------------------------------------------------------------------------------------------


def oldest_pending(
    trace: Mapping[str, Any], members: Mapping[str, tuple[int, ...]], now_ns: int
) -> PendingCollective | None:
    """The collective that has been under way for longest, of a flight recorder's trace."""
    pending = [entry for entry in trace.get("entries", ()) if not entry["retired"]]  # no key before the first
    if not pending:
        return None
    entry = min(pending, key=lambda one: one["time_created_ns"])
    group = entry["process_group"][0]
    return PendingCollective(
        operation=entry["profiling_name"].split(":")[-1],
        group=group,
        members=members.get(group, ()),
        number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        seconds=(now_ns - entry["time_created_ns"]) / 1e9,
    )


def pending_collective() -> PendingCollective | None:
    """The collective that this process has been in for longest; None when it is in none."""
    members: dict[str, tuple[int, ...]] = {
        group.group_name: tuple(sorted(ranks))
        for group, ranks in list(dist.distributed_c10d._world.pg_group_ranks.items())
        if isinstance(group, dist.ProcessGroup)  # of groups that this process is no member of there is only a number
    }
    found = [oldest_pending(json.loads(recorded()), members, time.time_ns()) for recorded in _recorders()]
    return max((one for one in found if one is not None), key=lambda one: one.seconds, default=None)


def _recorders() -> Iterator[_Recorder]:
    """Of gloo, and of NCCL where torch has it: each keeps its own."""
    module = torch._C._distributed_c10d
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (recorder := getattr(module, name, None)) is not None:
            yield recorder


def main_thread_line() -> str:
    """``take (danlu/data/stream.py:88)``: the innermost line of danlu that the main thread is in.

    Where only the command line of danlu is above, of whatever is not torch or Python's own library.
    """
    frames = _frames(sys._current_frames().get(threading.main_thread().ident or 0))
    frame = next(filter(_ours, frames), None) or next((one for one in frames if not _far(one)), None)
    if frame is None:
        return ""
    file = Path(frame.f_code.co_filename)
    shown = file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file.name
    return f"{frame.f_code.co_name} ({shown}:{frame.f_lineno})"


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _ours(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    # What sends for others is not the place of interest, nor what every process is in.
    return file.is_relative_to(PACKAGE) and file.name != "comm.py" and file.parent.name != "cli"


def _far(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(TORCH) or frame.f_code.co_filename.startswith(LIBRARY)


# -- in words ---------------------------------------------------------------------------------------------------------


def hang_message(states: Mapping[int, ProcessState | None], timeout_s: float) -> str:
    """Who waits in what, and who never came.

    states: of each process, by rank; None for one that does not answer. At least one of them waits.
    """
    longest = longest_wait(states)
    assert longest is not None, "one of them waits"
    here = {
        rank: state
        for rank, state in states.items()
        if state is not None and state.waiting is not None and state.waiting.same == longest.same
    }
    parts = []
    for number, (where, ranks) in enumerate(_by_place(here).items()):
        verb = "has" if len(ranks) == 1 else "have"
        in_what = f" {verb} waited for {longest.seconds:.0f} s in {_what(longest)}," if not number else ""
        parts.append(f"{format_ranks(ranks)}{in_what} at {where}")
    text = ", ".join(parts)
    missing = [rank for rank in longest.members or sorted(states) if rank not in here]
    absent = [_absent(rank, states.get(rank)) for rank in missing]
    if not absent:
        absent = ["all of them are there, so what they send does not arrive"]
    return f"{text}; {'; '.join(absent)}. A collective fails after {timeout_s:g} s (parallel.timeout_s)"


def longest_wait(states: Mapping[int, ProcessState | None]) -> PendingCollective | None:
    """The collective that any process has been in for longest; None when all move."""
    waits = [state.waiting for state in states.values() if state is not None and state.waiting is not None]
    return max(waits, key=lambda one: one.seconds, default=None)


def _by_place(states: Mapping[int, ProcessState]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        found.setdefault(state.place, []).append(rank)
    return found


def _what(waiting: PendingCollective) -> str:
    sizes = ", ".join("x".join(str(one) for one in size) or "one number" for size in waiting.sizes)
    return f"{waiting.operation} of {sizes}" if sizes else waiting.operation


def _absent(rank: int, state: ProcessState | None) -> str:
    if state is None:
        return f"{format_ranks([rank])} does not answer: it is stopped, or gone"
    if state.waiting is not None:
        return f"{format_ranks([rank])} waits in {_what(state.waiting)} instead, at {state.place}"
    return f"{format_ranks([rank])} never came: it is at {state.place}"


# -- the watch --------------------------------------------------------------------------------------------------------


class Watchdog:
    """Looks, in a thread of its own, whether a collective of this process takes too long, and whether others ask.

    Args:
        store      torch's store, on a connection that no other thread uses
        timeout_s  what a collective may take; the processes are asked a minute before, or after half of it
        say        tells the user; called in the one process of rank 0
        end        called with the words when the time is up: a process stuck in C++ has to be ended from outside
        launcher   process number of what has started this process; when that is gone, SIGTERM asks this one to stop
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        say: Callable[[str], None],
        end: Callable[[str], None],
        launcher: int | None = None,
        where: PhaseTracker = PHASE,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout_s = timeout_s
        self._patience_s = timeout_s - min(timeout_s / 2, LONGEST_WARNING_S)
        self._interval_s = min(5.0, self._patience_s / 10)
        self._say, self._end, self._launcher, self._where = say, end, launcher, where
        self._told: PendingCollective | None = None
        self._fails_at = 0.0  # when the collective that was told of has no time left, less what a look may be late
        self._said: tuple[str, int, str] | None = None  # what the user was last told of
        self._seen = 0  # questions that have been answered
        self._stop = threading.Event()
        self._settled = threading.Event()  # no question is being answered
        self._settled.set()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self.report: str | None = None
        """The words, from when they are told until the collective they are about is over."""

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._interval_s)

    def settled(self) -> str | None:
        """The report, once a question that the processes may be answering is done with."""
        self._settled.wait(self._timeout_s)
        return self.report

    def _run(self) -> None:
        answered = True  # by the store, until it is gone with the process that kept it: then nobody is left to ask
        while not self._stop.wait(self._interval_s):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._launcher = None
                os.kill(os.getpid(), signal.SIGTERM)
            if answered:
                try:
                    self._look()
                except dist.DistError:
                    answered = False

    def _look(self) -> None:
        waiting, looked = pending_collective(), time.monotonic()
        if self._told is not None and (waiting is None or waiting.same != self._told.same):
            in_time = looked < self._fails_at
            if in_time and self._rank == 0:
                self._say(f"the collective {self._told.operation} is over, and the run goes on")
            if in_time or waiting is not None:  # else it has failed, and the report is what there is to say
                self._told = self.report = None
        asked = self._store.add("hang/asked", 0)
        if waiting is not None and waiting.seconds >= self._patience_s and self._told is None and asked == self._seen:
            asked = self._store.add("hang/asked", 1)
        if asked > self._seen:
            self._settled.clear()
            # Several may have asked at once, and each of them waits for answers to its own question.
            for question in range(self._seen + 1, asked + 1):
                self._answer(question)
            states = self._collect(asked)
            self._seen = asked
            if (longest := longest_wait(states)) is not None:
                text = hang_message(states, self._timeout_s)
                if waiting is not None and self._told is None:  # else two had asked: the first answer is the one told
                    self._told, self.report = waiting, text
                    self._fails_at = looked + self._timeout_s - waiting.seconds - self._interval_s
                if self._rank == 0 and longest.same != self._said:
                    self._say(text)
                self._said = longest.same
            self._settled.set()
        if waiting is not None and waiting.seconds > self._timeout_s + max(2.0, self._interval_s):
            self._end(
                self.report or f"{format_ranks([self._rank])} waited in {_what(waiting)} for {waiting.seconds:.0f} s"
            )

    def _answer(self, question: int) -> None:
        state = ProcessState(pending_collective(), str(self._where), main_thread_line())
        self._store.set(f"hang/{question}/{self._rank}", state.encode())

    def _collect(self, question: int) -> dict[int, ProcessState | None]:
        """What the processes answer, within most of the time that is left: one may be slow to notice the question."""
        keys = {rank: f"hang/{question}/{rank}" for rank in range(self._size)}
        until = time.monotonic() + max(2.5 * self._interval_s, 0.6 * (self._timeout_s - self._patience_s))
        while time.monotonic() < until and not self._store.check(list(keys.values())):
            time.sleep(self._interval_s / 10)
        return {rank: decode(self._store.get(key)) if self._store.check([key]) else None for rank, key in keys.items()}
