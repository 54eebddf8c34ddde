"""How the processes of a run find each other: rank 0 (or an elastic agent) keeps a store, and all wait there for all.

Everything that may last is waited for in Python, in short looks: torch's own rendezvous waits in C++, where Ctrl-C does
not reach it, says nothing for minutes, and asks a program of another kind that has the port without end.
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

from danlu.errors import RecipeError, ResourceError
from danlu.parallel.world import World, format_ranks

PATIENCE_S = 20.0
"""Until the user is told who is waited for: processes load torch at different speeds."""

_CONNECTING_S = 2.0
_BETWEEN_LOOKS_S = 0.05


def rendezvous(
    world: World, timeout_s: float, say: Callable[[str], None], go_on: Callable[[], None] = lambda: None
) -> Any:
    """torch's store, once every process of `world` has come to it.

    timeout_s: after which those that have not come are given up, and what the store's own calls may take.
    say: tells the user who is waited for. go_on: called again and again; raises what ends the waiting.
    Raises ResourceError that names who has not come, or says why rank 0 cannot be reached or cannot listen.
    """
    if not 0 < world.port < 1 << 16:
        raise RecipeError(f"MASTER_PORT is {world.port} (from {world.found_in}): ports are numbers from 1 to 65535")
    wait = _Wait(timeout_s, say if world.local_rank in (0, None) else _silence, go_on)
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _store(world, timeout_s, wait))
    if store.add(f"here/{world.rank}", 1) > 1:
        raise RecipeError(f"two processes say that they are rank {world.rank} of {world.size} at {_place(world)}")
    store.add("come", 1)

    def absent() -> str | None:
        if store.add("come", 0) >= world.size:
            return None
        missing = [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]
        verb = "has" if len(missing) == 1 else "have"
        return f"{format_ranks(missing)} of {world.size} {verb} not come to {_place(world)}"

    # The time of rank 0 alone counts: the others come after it, and would each tell of the same.
    missing = wait.until(lambda: store.add("come", 0) >= world.size, absent, limited=world.rank == 0)
    if missing is not None:
        raise ResourceError(
            f"{missing} in {timeout_s:g} s. Start all {world.size} processes, each with its own RANK; what one that "
            "failed has said is in its own output. To train in one process, unset WORLD_SIZE"
        )
    return store


class _Wait:
    """Waiting with a time limit, of which the user is told once it takes long."""

    def __init__(self, timeout_s: float, say: Callable[[str], None], go_on: Callable[[], None]) -> None:
        now = time.monotonic()
        self._patient_until, self._until = now + min(PATIENCE_S, timeout_s / 2), now + timeout_s
        self._say, self._go_on = say, go_on

    def until(self, done: Callable[[], bool], why: Callable[[], str | None], *, limited: bool = True) -> str | None:
        """Returns None once it is done, or why it is not when the time is up; both are asked again and again."""
        told = False
        while not done():
            now = time.monotonic()
            if limited and now > self._until and (reason := why()) is not None:
                return reason
            if not told and now > self._patient_until and (reason := why()) is not None:
                self._say(f"waiting: {reason}")
                told = True
            self._go_on()
            time.sleep(_BETWEEN_LOOKS_S)
        return None


def _store(world: World, timeout_s: float, wait: _Wait) -> Any:
    """The store, kept by this process where it is rank 0 and no elastic agent keeps one."""
    keeps = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found: list[Any] = []

    def make() -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            found.append(TCPStore(world.address, world.port, world.size, keeps, limit, False, multi_tenant=True))
        except (RuntimeError, OSError) as error:
            found.append(error)

    # Tries until rank 0 listens; where another program has the port, it never comes back.
    threading.Thread(target=make, name="store", daemon=True).start()
    why = wait.until(lambda: bool(found), lambda: _out_of_reach(world))
    if why is None and not isinstance(found[0], Exception):
        return found[0]
    if keeps and found:
        raise ResourceError(
            f"rank 0 of {world.size} cannot listen at {_place(world)}: {str(found[0]).splitlines()[0].rstrip('.')}. "
            "If another program has the port, set MASTER_PORT to a free one in all processes"
        ) from found[0]
    raise ResourceError(
        f"{why or _out_of_reach(world)}. Is rank 0 running, is MASTER_ADDR the machine that it runs on, is the port "
        "its own, and may this machine connect to it?"
    )


def _out_of_reach(world: World) -> str:
    """Why this process does not come to rank 0. Asked late: a connection without a word costs a busy store seconds."""
    try:
        socket.create_connection((world.address, world.port), timeout=_CONNECTING_S).close()
        reason = "what listens there does not answer as the store of a run does"
    except OSError as error:
        reason = error.strerror or str(error)
    return f"rank 0 of {world.size} cannot be reached at {_place(world)}: {reason}"


def _place(world: World) -> str:
    return f"{world.address}:{world.port} (from {world.found_in})"


def _silence(text: str) -> None:
    """What processes other than the first of a machine say."""
