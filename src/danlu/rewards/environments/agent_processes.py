"""The caller's side of the process that begins agents."""

from __future__ import annotations

import selectors
import weakref

from danlu.core.worker_process import LOAD_TIMEOUT_S, WorkerProcess, decoded, end_all, one_thread
from danlu.rewards.environments.agent_host import START
from danlu.rewards.environments.agents import AgentCall, AgentResult, AgentSource
from danlu.rewards.environments.protocol import EpisodeKey


class AgentProcesses:
    """Agents in processes of their own, begun by one that has loaded their code. From one thread at a time."""

    def __init__(self, source: AgentSource) -> None:
        self._source = source
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
        host = self._hosts[0] = WorkerProcess(START, self._source, variables=one_thread())
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
        (host,) = self._hosts
        if host is not None:
            host.register(selector)

    def results(self) -> dict[EpisodeKey, AgentResult]:
        """Returns the results of the agents that have ended since the last call."""
        (host,) = self._hosts
        results: dict[EpisodeKey, AgentResult] = {}
        if host is None:
            return results
        is_gone = host.is_gone
        while (reply := decoded(host.take())) is not None:
            number, sample = reply["key"]
            if (number, sample) in self._running:
                results[number, sample] = AgentResult(reply["reward"], reply["failure"])
        self._running -= results.keys()
        if is_gone:
            lost = AgentResult(failure=f"the process that began it is gone: its process {host.ending()}")
            results |= dict.fromkeys(self._running, lost)
            self.close()
        return results

    def close(self) -> None:
        """Ends all agents and the process that began them."""
        end_all(self._hosts)
        self._running.clear()
