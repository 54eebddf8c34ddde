"""How the processes of a run find each other: rank 0 (or an elastic agent) keeps a store, where all wait for all.

Whatever may last is waited for in Python, with short sleeps: torch's own rendezvous waits in C++, where Ctrl-C does not
reach it, prints nothing for minutes, and asks a program of another kind that has the port without end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from danlu.core.errors import RecipeError, ResourceError
from danlu.parallel.world import World, format_ranks

NOTICE_AFTER_S = 20.0
"""Seconds after which the user sees who is waited for: processes load torch at different speeds."""

_CONNECT_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.05


def rendezvous(
    world: World, timeout_s: float, log: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Any:
    """Waits until every process of `world` has joined, and returns torch's store.

    timeout_s: after which processes that have not come are given up, and the limit of the store's own calls. log: shows
        a message that names who is waited for. check: called again and again; raises an error to end the waiting.
    Raises ResourceError that names who has not come, or says why rank 0 cannot be reached or cannot listen; RecipeError
    for a port or a rank that cannot be.
    """
    if not 0 < world.port < 1 << 16:
        raise RecipeError(f"MASTER_PORT is {world.port} (from {world.source}): ports are numbers from 1 to 65535")
    is_first = world.local_rank in (0, None)  # of its machine: it speaks for all of them
    wait = _Wait(timeout_s, log if is_first else lambda text: None, check)
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _store(world, timeout_s, wait))
    if store.add(f"here/{world.rank}", 1) > 1:
        raise RecipeError(f"two processes say that they are rank {world.rank} of {world.size} at {_address(world)}")
    store.add("come", 1)

    def absent() -> str | None:
        if store.add("come", 0) >= world.size:
            return None
        missing = [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]
        verb = "has" if len(missing) == 1 else "have"
        return f"{format_ranks(missing)} of {world.size} {verb} not come to {_address(world)}"

    # The time of rank 0 alone counts: the others come after it, and would each report the same.
    missing = wait.until(lambda: store.add("come", 0) >= world.size, absent, limited=world.rank == 0)
    if missing is not None:
        raise ResourceError(
            f"{missing} in {timeout_s:g} s. Start all {world.size} processes, each with its own RANK; what one that "
            "failed has said is in its own output. To train in one process, unset WORLD_SIZE"
        )
    return store


class _Wait:
    """Waiting within a time limit; the user gets one notice when it takes long."""

    def __init__(self, timeout_s: float, log: Callable[[str], None], check: Callable[[], None]) -> None:
        start = time.monotonic()
        self._notice_at_s, self._until_s = start + min(NOTICE_AFTER_S, timeout_s / 2), start + timeout_s
        self._log, self._check = log, check

    def until(self, done: Callable[[], bool], why: Callable[[], str | None], *, limited: bool = True) -> str | None:
        """None once `done()`, or `why()` when the time is up; both are asked again and again.

        `why` says why it is not done, None if it is after all. limited: whether the time limit holds.
        """
        noticed = False
        while not done():
            clock_s = time.monotonic()
            if limited and clock_s > self._until_s and (reason := why()) is not None:
                return reason
            if not noticed and clock_s > self._notice_at_s and (reason := why()) is not None:
                self._log(f"waiting: {reason}")
                noticed = True
            self._check()
            time.sleep(_POLL_INTERVAL_S)
        return None


def _store(world: World, timeout_s: float, wait: _Wait) -> Any:
    """The store, kept by this process where it is rank 0 and no elastic agent keeps one."""
    is_server = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    outcome: list[Any] = []  # the store, or the exception

    def connect() -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            outcome.append(TCPStore(world.address, world.port, world.size, is_server, limit, False, multi_tenant=True))
        except (RuntimeError, OSError) as error:
            outcome.append(error)

    # Tries until rank 0 listens; where another program has the port, it never returns.
    threading.Thread(target=connect, name="store", daemon=True).start()
    why = wait.until(lambda: bool(outcome), lambda: _unreachable(world))
    if why is None and not isinstance(outcome[0], Exception):
        return outcome[0]
    if is_server and outcome:
        reason = str(outcome[0]).splitlines()[0].rstrip(".")
        raise ResourceError(
            f"rank 0 of {world.size} cannot listen at {_address(world)}: {reason}. "
            "If another program has the port, set MASTER_PORT to a free one in all processes"
        ) from outcome[0]
    raise ResourceError(
        f"{why or _unreachable(world)}. Is rank 0 running, is MASTER_ADDR the machine that it runs on, is the port "
        "its own, and may this machine connect to it?"
    )


def _unreachable(world: World) -> str:
    """Why this process does not reach rank 0. Asked late: a connection that says nothing costs a busy store seconds."""
    try:
        socket.create_connection((world.address, world.port), timeout=_CONNECT_TIMEOUT_S).close()
        reason = "what listens there does not answer as the store of a run does"
    except OSError as error:
        reason = error.strerror or str(error)
    return f"rank 0 of {world.size} cannot be reached at {_address(world)}: {reason}"


def _address(world: World) -> str:
    return f"{world.address}:{world.port} (from {world.source})"
