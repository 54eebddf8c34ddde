"""Whether the Hugging Face hub answers; where it does not, its client looks in the local cache alone.

The client tries an address that does not answer six times, for half a minute.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

ANSWER_S = 3.0
"""How long the hub's host is waited for before its client looks in the local cache alone."""
REMEMBERED_S = 60.0
"""How long a host that did not answer is not asked again."""
_silent: dict[tuple[str, int], tuple[float, str]] = {}  # by host and port: when it did not answer, and why


@contextmanager
def hub_within_bound() -> Iterator[str | None]:
    """Bounds the time that the hub's client takes where the host does not answer: the client is offline then.

    Yields the reason, or None where the host answers, and where only the client can tell.
    """
    from huggingface_hub import constants

    reason = _unreachable()
    # `datasets` has a setting of its own; it is not loaded for this.
    modules = [module for module in (constants, sys.modules.get("datasets.config")) if module is not None]
    before = [module.HF_HUB_OFFLINE for module in modules]
    if reason is not None:
        for module in modules:
            module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield reason
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]


def _unreachable() -> str | None:
    """Why the hub's host does not answer; None where it does, or where only the client can tell: behind a proxy."""
    from huggingface_hub import constants

    datasets = sys.modules.get("datasets.config")
    if constants.HF_HUB_OFFLINE or (datasets is not None and datasets.HF_HUB_OFFLINE) or getproxies():
        return None
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    asked, reason = _silent.get((host, port), (-REMEMBERED_S, ""))
    if time.monotonic() - asked < REMEMBERED_S:
        return reason
    problems = [f"{host} does not answer within {ANSWER_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=ANSWER_S).close()
        except OSError as error:
            problems.append(f"{host} cannot be reached: {error}")
        else:
            problems.clear()

    # A thread, as looking up a name has no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not problems:
        return None
    _silent[host, port] = time.monotonic(), problems[-1]
    return problems[-1]
