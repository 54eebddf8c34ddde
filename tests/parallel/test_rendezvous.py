"""How processes find each other, and what is told of those that do not come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from danlu.core.errors import RecipeError, ResourceError
from danlu.parallel.rendezvous import rendezvous
from danlu.parallel.world import World

SHORT_S, LONG_S = 2.0, 60.0
"""What is waited for in vain, with time for a busy machine to look again; and what comes, or fails, by itself."""


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    return found


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def mute(port: int) -> Iterator[None]:
    """A program that takes connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", port))):
        yield


def world(rank: int, port: int, size: int = 2, local_rank: int | None = None) -> World:
    return World(rank, size, local_rank, "127.0.0.1", port, "here")


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned or raised, all at the same time."""
    found: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_come_to_one_store(port: int) -> None:
    said: list[str] = []
    # Rank 0, which keeps the store, may well be the last to begin.
    stores = together(*(lambda rank=rank: rendezvous(world(rank, port, 3), LONG_S, said.append) for rank in (2, 1, 0)))
    assert [store.add("seen", 1) for store in stores] == [1, 2, 3]
    assert said == []


@dataclass
class Waited:
    """What a process that waited in vain said meanwhile, and its error in the end."""

    port: int
    said: list[str]
    error: Exception


@pytest.fixture(scope="module")
def waited() -> dict[str, Waited]:
    """Of several that wait at the same time, each at a port of its own."""
    worlds: dict[str, tuple[int, int, int | None]] = {
        "for three ranks": (0, 4, None),
        "alone on its machine": (1, 2, None),
        "first of its machine": (1, 2, 0),
        "second of its machine": (1, 2, 1),
        "another program": (1, 2, None),
    }
    with ExitStack() as stack:
        # A program that takes connections and says nothing.
        mute = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        ports = {name: mute.getsockname()[1] if name == "another program" else free_port() for name in worlds}
        said: dict[str, list[str]] = {name: [] for name in worlds}

        def wait(name: str) -> None:
            rank, size, local_rank = worlds[name]
            rendezvous(world(rank, ports[name], size, local_rank), SHORT_S, said[name].append)

        errors = together(*(partial(wait, name) for name in worlds))
        return {name: Waited(ports[name], said[name], error) for name, error in zip(worlds, errors, strict=True)}


def test_who_has_not_come_is_named_before_the_time_is_up_and_after(waited: dict[str, Waited]) -> None:
    found = waited["for three ranks"]
    assert isinstance(found.error, ResourceError)
    where = f"127.0.0.1:{found.port} (from here)"
    assert found.said == [f"waiting: ranks 1-3 of 4 have not come to {where}"]
    assert str(found.error).startswith(f"ranks 1-3 of 4 have not come to {where} in 2 s. Start all 4 processes")


@pytest.mark.parametrize(
    ("name", "tells"),
    [("alone on its machine", True), ("first of its machine", True), ("second of its machine", False)],
)
def test_nobody_listens(waited: dict[str, Waited], name: str, tells: bool) -> None:
    found = waited[name]
    assert isinstance(found.error, ResourceError)
    assert "Is rank 0 running, is MASTER_ADDR the machine" in str(found.error)
    why = f"rank 0 of 2 cannot be reached at 127.0.0.1:{found.port} (from here): Connection refused"
    assert str(found.error).startswith(f"{why}. ")
    assert found.said == ([f"waiting: {why}"] if tells else [])  # of a machine's processes one is enough


def test_no_such_machine(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(place: Any, timeout: float) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("danlu.parallel.rendezvous.socket.create_connection", look_up)
    with pytest.raises(ResourceError, match=r"cannot be reached at 127.0.0.1:\d+ \(from here\): Name or service not"):
        rendezvous(world(1, port), SHORT_S, print)


def test_another_program_has_the_port(waited: dict[str, Waited], port: int, mute: None) -> None:
    error = waited["another program"].error
    assert isinstance(error, ResourceError)
    assert "what listens there does not answer as the store of a run does. Is rank 0" in str(error)
    with pytest.raises(ResourceError, match=rf"rank 0 of 2 cannot listen at 127.0.0.1:{port} .*address already in use"):
        rendezvous(world(0, port), LONG_S, print)


def test_a_port_that_is_none() -> None:
    for port in (0, 1 << 16):
        with pytest.raises(RecipeError, match=f"MASTER_PORT is {port} "):
            rendezvous(world(0, port), LONG_S, print)


def test_two_that_say_they_are_the_same(port: int) -> None:
    one, *others = together(*(lambda rank=rank: rendezvous(world(rank, port), LONG_S, print) for rank in (0, 1, 1)))
    assert not isinstance(one, Exception)
    assert [str(other) for other in others if isinstance(other, Exception)] == [
        f"two processes say that they are rank 1 of 2 at 127.0.0.1:{port} (from here)"
    ]


def test_what_ends_the_waiting(port: int) -> None:
    def gone() -> None:
        raise ResourceError("the launcher is gone")

    with pytest.raises(ResourceError, match="the launcher is gone"):
        rendezvous(world(0, port), LONG_S, print, gone)
    with pytest.raises(ResourceError, match="the launcher is gone"):
        rendezvous(world(1, port + 1), LONG_S, print, gone)


def test_an_agent_keeps_one_store_for_all_attempts(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = together(*(lambda rank=rank: rendezvous(world(rank, port), LONG_S, print) for rank in (0, 1)))
    assert first[0].add("seen", 1) == 1
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = together(*(lambda rank=rank: rendezvous(world(rank, port), LONG_S, print) for rank in (0, 1)))
    assert again[0].add("seen", 1) == 1  # those of the attempt before are not taken for these
    assert first[1].add("seen", 1) == 2
