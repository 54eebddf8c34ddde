"""How much memory a process may still take: of its device, or of the host within the limits of its container."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from danlu.core.machine import free_memory_bytes

if TYPE_CHECKING:
    import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Returns the bytes that are free on a CUDA device, or `host_available_bytes`; None where unknown."""
    if device.type == "cuda":
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        # Freed memory that torch keeps is free for tensors too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_available_bytes()


def host_available_bytes() -> int | None:
    """Returns the bytes that the host can give without swapping; None where unknown.

    On Linux that is MemAvailable (free memory, and caches that can be dropped), or the rest of the control group's
    limit, if that is less: a process that takes more is killed.
    """
    limits = [limit for limit in (_host_available(_MEMINFO), _cgroup_available(_CGROUPS)) if limit is not None]
    return min(limits, default=None)


def host_memory_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Bytes of all memory and swap space of this machine, used or not; None where nothing tells."""
    totals = {"MemTotal:": 0, "SwapTotal:": 0}
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(" ")
            if name in totals:
                totals[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return sum(totals.values()) if totals["MemTotal:"] else None


def _host_available(meminfo: Path) -> int | None:
    """MemAvailable of /proc/meminfo (proc(5)), else free memory as sysconf(3) tells it."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return free_memory_bytes()
    except (AttributeError, OSError, ValueError):  # systems that tell nothing
        return None


def _cgroup_available(root: Path) -> int | None:
    """Returns the bytes that this process's control group (version 2, as containers see it, or version 1) may still
    take.

    Inactive file cache does not count as used: the kernel drops it before it kills.
    """
    for limit, used, files, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            limit_text, used_bytes = (root / limit).read_text().strip(), int((root / used).read_text())
            stat = dict(line.split() for line in (root / files).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit_text.isdigit():  # "max" where there is no limit
            return max(0, int(limit_text) - used_bytes + int(stat.get(cached, "0")))
    return None
