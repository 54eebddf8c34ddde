"""Queries of the operating system that Linux and macOS answer differently, or one of them not at all."""

from __future__ import annotations

import os
from pathlib import Path

_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


def usable_cores() -> int:
    """The cores this process may use, where the system says so (Linux): in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory_bytes() -> int:
    """Bytes of the whole machine's memory, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes() -> int:
    """Bytes of memory that nobody uses; half of the machine's where the system does not say (macOS)."""
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return total_memory_bytes() // 2


def oom_kill_count() -> int | None:
    """Processes of this control group that the system has killed for want of memory; None where it does not count."""
    try:
        events = dict(line.split() for line in _MEMORY_EVENTS.read_text(encoding="utf-8").splitlines())
        return int(events["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def pid_is_alive(pid: int) -> bool:
    """Whether a process with this number runs on this machine, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_start_ticks(pid: int) -> str:
    """Returns the start of a process of this machine, in clock ticks since the boot; "" where the system does not say.

    A pid may be given to another process later; the pair of pid and start is unique.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # proc(5): field 22; the name in brackets may hold anything
