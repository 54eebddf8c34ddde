"""The caller's side of the process that begins agents."""

from __future__ import annotations

import selectors
import weakref

from danlu.rewards.environments.agent_host import START
from danlu.rewards.environments.agents import AgentCall, AgentResult, AgentSource
from danlu.rewards.environments.protocol import EpisodeKey
from danlu.rewards.worker_connection import LOAD_TIMEOUT_S, WorkerConnection, end_all


class AgentProcesses:
    """Agents in processes of their own, begun by one that has loaded their code. From one thread at a time."""

    def __init__(self, source: AgentSource) -> None:
        self.source = source
        self._hosts: list[WorkerConnection | None] = [None]
        self._running: set[EpisodeKey] = set()
        weakref.finalize(self, end_all, self._hosts)

    def start(self) -> WorkerConnection:
        """The process, which has loaded the source; started where there is none.

        Raises RecipeError with its problems, ResourceError where the process ends or takes too long.
        """
        (host,) = self._hosts
        if host is not None:
            return host
        host = self._hosts[0] = WorkerConnection(START, self.source, LOAD_TIMEOUT_S)
        try:
            host.wait_until_loaded(f"environment: loading {self.source.label}")
        except BaseException:
            self.close()
            raise
        return host

    def begin(self, call: AgentCall) -> None:
        """Begins an agent. Raises the errors of `start`."""
        self.start().post(call)
        self._running.add(call.key)

    def end(self, key: EpisodeKey) -> None:
        """Ends an agent, which will have no result."""
        (host,) = self._hosts
        if host is not None and key in self._running:
            host.post(key)
        self._running.discard(key)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Has a selector wake up when an agent has ended."""
        (host,) = self._hosts
        if host is not None:
            host.register(selector)

    def results(self) -> dict[EpisodeKey, AgentResult]:
        """Returns the results of the agents that have ended since the last call."""
        (host,) = self._hosts
        results: dict[EpisodeKey, AgentResult] = {}
        if host is None:
            return results
        while (reply := host.receive()) is not None:
            number, sample = reply["key"]
            if (number, sample) in self._running:
                results[number, sample] = AgentResult(reply["reward"], reply["failure"])
        self._running -= results.keys()
        if (ending := host.ending) is not None:
            lost = AgentResult(failure=f"the process that began it is gone: {ending}")
            results |= dict.fromkeys(self._running, lost)
            self.close()
        return results

    def close(self) -> None:
        """Ends all agents and the process that began them."""
        end_all(self._hosts)
        self._running.clear()
