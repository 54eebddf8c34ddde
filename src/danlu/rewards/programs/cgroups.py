"""Limits on the memory and the processes of a sandbox together: control groups, where this process may make some."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "danlu-code"
_lock = threading.Lock()
_free: dict[int, list[Cgroup]] = {}
_own_cgroups: list[Cgroup] = []


@dataclass(frozen=True)
class Cgroup:
    """A control group: a folder of version 2, or one of each controller of version 1."""

    memory: Path
    pids: Path | None

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.memory,) if self.pids in (None, self.memory) else (self.memory, self.pids)  # type: ignore[return-value]

    def kills(self) -> int:
        """How many processes have been ended because all of them together took too much memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                fields = (self.memory / name).read_text().split()
                return int(fields[fields.index("oom_kill") + 1]) if "oom_kill" in fields else 0
        return 0

    def exists(self) -> bool:
        """Whether nobody has removed it: one of a process that another PID namespace does not see looks abandoned."""
        return all(folder.exists() for folder in self.folders)

    def is_empty(self) -> bool:
        return all(not (folder / "cgroup.procs").read_text().strip() for folder in self.folders)


def take_cgroup(memory_bytes: int, most_processes: int) -> Cgroup | None:
    """A control group with these limits and without processes; None where this process may make none."""
    with _lock:
        waiting = _free.setdefault(memory_bytes, [])
        while waiting:
            cgroup = waiting.pop()
            if cgroup.exists():
                return cgroup
        parents = _parents()
        if parents is None:
            return None
        new = _make(*parents, f"{PREFIX}-{os.getpid()}-{len(_own_cgroups)}", memory_bytes, most_processes)
        if new is not None:
            _own_cgroups.append(new)
        return new


def give_cgroup_back(cgroup: Cgroup, memory_bytes: int) -> None:
    """Returns a cgroup for the next sandbox, if it is empty."""
    with contextlib.suppress(OSError):
        if cgroup.is_empty():
            with _lock:
                _free[memory_bytes].append(cgroup)


def _make(memory: Path, pids: Path | None, name: str, memory_bytes: int, most_processes: int) -> Cgroup | None:
    cgroup = Cgroup(memory / name, None if pids is None else pids / name)
    try:
        for folder in cgroup.folders:
            folder.mkdir()
        _set_memory(cgroup.memory, memory_bytes)
        if cgroup.pids is not None:
            (cgroup.pids / "pids.max").write_text(str(most_processes))
    except OSError:
        _remove(cgroup)
        return None
    return cgroup


def _set_memory(folder: Path, memory_bytes: int) -> None:
    """Sets the limit, of memory and swap together. Raises OSError where the group has none."""
    if (folder / "memory.limit_in_bytes").exists():
        (folder / "memory.limit_in_bytes").write_text(str(memory_bytes))
        if (folder / "memory.memsw.limit_in_bytes").exists():
            (folder / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
        return
    (folder / "memory.max").write_text(str(memory_bytes))
    for name, value in {"memory.swap.max": "0", "memory.oom.group": "1"}.items():
        with contextlib.suppress(OSError):
            (folder / name).write_text(value)


@cache
def _parents() -> tuple[Path, Path | None] | None:
    """The folders, of memory and of processes, in which this process can make control groups with limits."""
    try:
        own = _own_groups()
        mounts = list(_mounts())
    except OSError:
        return None
    parents: dict[str, Path] = {}
    for controller in ("memory", "pids"):
        for place, controllers in mounts:
            key = controller if controllers else ""
            if (controllers and controller not in controllers) or key not in own:
                continue
            for folder in (place / own[key].lstrip("/"), place):
                if controller not in parents and _allows(folder, controller, bool(controllers)):
                    parents[controller] = folder
    return (parents["memory"], parents.get("pids")) if "memory" in parents else None


def _allows(folder: Path, controller: str, is_version_1: bool) -> bool:
    """Whether a group with the controller can be made in a folder, which is tried."""
    if not is_version_1:
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    trial = folder / f"{PREFIX}-{os.getpid()}-trial"
    names = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max",)}[controller]
    try:
        _remove_those_of_ended_processes(folder)
        trial.mkdir()
        try:
            return any(os.access(trial / name, os.W_OK) for name in names)
        finally:
            trial.rmdir()
    except OSError:
        return False


def _own_groups() -> dict[str, str]:
    """Returns the groups that this process is in, by controller of version 1, and as "" of version 2."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounts() -> Iterator[tuple[Path, list[str]]]:
    """The mounts of control groups with their controllers; none of version 2, which has all."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2":
            yield Path(place), []
        elif kind == "cgroup":
            yield Path(place), options.split(",")


def _remove_those_of_ended_processes(folder: Path) -> None:
    for each in folder.glob(f"{PREFIX}-*"):
        pid = each.name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                each.rmdir()


def _remove(cgroup: Cgroup) -> None:
    for folder in cgroup.folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def remove_all() -> None:
    """Removes the control groups of this process, in which nothing runs any more."""
    for cgroup in _own_cgroups:
        _remove(cgroup)
