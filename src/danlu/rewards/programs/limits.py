"""The limits of a process and of those that it starts, for both sides of the pipe."""

from __future__ import annotations

import resource


def limit(limits: dict[str, int]) -> None:
    """Sets limits that this process and those that it starts cannot raise again."""
    for name, wanted in limits.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        try:
            _, hard = resource.getrlimit(kind)
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):
            pass  # macOS knows some of them by name alone
