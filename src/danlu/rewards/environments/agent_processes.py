"""The caller's side of the process that begins agents."""

from __future__ import annotations

import os
import selectors
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue

from danlu.core.worker_process import LOAD_TIMEOUT_S, Event, WorkerProcess, decoded, end_all, one_thread
from danlu.rewards.environments.agent_host import START
from danlu.rewards.environments.agents import AgentCall, AgentResult, AgentSource
from danlu.rewards.environments.protocol import EpisodeKey


class _Events(SimpleQueue[Event]):
    """A queue for which a selector wakes up."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        for descriptor in (self.reading, self._writing):
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor)

    def put(self, item: Event, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        with suppress(BlockingIOError):  # it is awake
            os.write(self._writing, b".")

    def take(self) -> list[Event]:
        """All events that are there."""
        with suppress(BlockingIOError):
            while os.read(self.reading, 4096):
                pass
        events = []
        with suppress(Empty):
            while True:
                events.append(self.get_nowait())
        return events


class AgentProcesses:
    """Agents in processes of their own, begun by one that has loaded their code. From one thread at a time."""

    def __init__(self, source: AgentSource) -> None:
        self._source, self._events = source, _Events()
        self._hosts: list[WorkerProcess | None] = [None]
        self._running: set[EpisodeKey] = set()
        weakref.finalize(self, end_all, self._hosts)

    def start(self) -> WorkerProcess:
        """The process, which has loaded the source; started where there is none.

        Raises RecipeError with its problems, ResourceError where the process ends or takes too long.
        """
        (host,) = self._hosts
        if host is not None:
            return host
        host = self._hosts[0] = WorkerProcess(START, self._source, events=self._events, variables=one_thread())
        try:
            host.wait_until_loaded(f"environment: loading {self._source.label}", LOAD_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return host

    def begin(self, call: AgentCall) -> None:
        """Begins an agent. Raises the errors of `start`."""
        self.start().send(call)
        self._running.add(call.key)

    def end(self, key: EpisodeKey) -> None:
        """Ends an agent, which will have no result."""
        (host,) = self._hosts
        if host is not None and key in self._running:
            host.send(key)
        self._running.discard(key)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Has a selector wake up when an agent has ended."""
        selector.register(self._events.reading, selectors.EVENT_READ)

    def results(self) -> dict[EpisodeKey, AgentResult]:
        """Returns the results of the agents that have ended since the last call."""
        (host,) = self._hosts
        results: dict[EpisodeKey, AgentResult] = {}
        for worker, content in self._events.take():
            if host is None or worker is not host:
                continue
            if (reply := decoded(content)) is None:
                lost = AgentResult(failure=f"the process that began it is gone: its process {host.ending()}")
                results |= dict.fromkeys(self._running, lost)
                self.close()
                break
            number, sample = reply["key"]
            if (number, sample) in self._running:
                results[number, sample] = AgentResult(reply["reward"], reply["failure"])
                self._running.remove((number, sample))
        return results

    def close(self) -> None:
        """Ends all agents and the process that began them."""
        end_all(self._hosts)
        self._running.clear()
