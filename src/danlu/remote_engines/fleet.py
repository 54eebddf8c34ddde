"""The rollout servers of an engine, of which there may be one: the least loaded is asked, the others answer requests of
a lost one.

A server that does not answer any more is left out. One that is there again gets the present weights from the files of
the latest hand-over, has to answer a canary's prompts as the others did, and then gets requests again. Draws follow
from requests, so it makes no difference which server answers (with `danlu serve`; the others draw alike where they
round alike).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from danlu.core.errors import DanluError, ModelError
from danlu.core.http_client import ConnectionLost, HTTPClient, RequestRefused
from danlu.core.terminal import print_status
from danlu.remote_engines.canary import CanaryAnswers
from danlu.remote_engines.server_interface import Continuation, RolloutServer, ServerAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from danlu.models.config import ModelConfig

Result = TypeVar("Result")

POLL_S = 0.5
"""Seconds between looks for a server that is gone."""
HEALTH_TIMEOUT_S = 5.0
FAILED = 500
"""The status of an answer that a server failed at; those above say that it, or a way to it, is not there."""

Connect = Callable[[HTTPClient], RolloutServer]
"""Returns the server of a client, not checked yet; see `detect.detect_server`."""


@dataclass
class Replica:
    """One of the servers."""

    client: HTTPClient
    server: RolloutServer | None = None
    """None until it was reached."""
    is_usable: bool = False
    in_flight: int = 0
    """Requests that it is working on."""
    refused_at: str | None = None
    """The label of the weights with which it did not pass; it is not tried again before there are others."""

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def connected(self) -> RolloutServer:
        """The server, where it was reached."""
        assert self.server is not None, f"{self.url} was not reached yet"
        return self.server


@dataclass
class Weights:
    """The latest weights of the servers. load: hands them to a server; None: servers have those they were started
    with."""

    label: str = ""
    load: Callable[[RolloutServer], None] | None = None
    canary: CanaryAnswers | None = None
    """The answers of a server with these weights, once the canary has passed."""


class ServerFleet:
    """The servers of an engine, and the requests and weights that each has.

    Args:
        clients: one for each server.
        connect: makes the server of a client, such as `detect.detect_server`.
        reloads: whether a lost server is left out, and given the present weights when it is there again. Else there is
            one server: its errors are raised, and it has to come back with the weights that it had.
    """

    def __init__(self, clients: Sequence[HTTPClient], connect: Connect, *, reloads: bool = True) -> None:
        assert clients and (reloads or len(clients) == 1), "several servers are given weights when they come back"
        self.reloads = reloads
        self.replicas = [Replica(client, is_usable=not reloads) for client in clients]
        self.address = ", ".join(replica.url for replica in self.replicas)
        self.context = 0
        """The most tokens of a prompt and its answer that all of them take; known after `check`."""
        self._connect = connect
        self._config: ModelConfig | None = None
        self._in_form = False
        self._weights = Weights()
        self._is_idle = False
        """Whether answers are not wanted: while paused, and while asleep."""
        self._control = threading.RLock()
        """Held while servers are controlled, so that none comes back in the middle of it."""
        self._changed = threading.Condition()
        """Guards the state of replicas, and the places of requests."""
        self._places: dict[str, Replica] = {}  # of requests by id
        self._pool = ThreadPoolExecutor(len(clients), thread_name_prefix="rollout-server")
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rollout-servers", daemon=True)

    @property
    def usable(self) -> list[Replica]:
        """Those that are asked now."""
        with self._changed:
            return [replica for replica in self.replicas if replica.is_usable]

    @property
    def connected(self) -> list[RolloutServer]:
        """The servers that were reached."""
        return [replica.server for replica in self.replicas if replica.server is not None]

    @property
    def name(self) -> str:
        """Their name in messages."""
        return "the rollout servers" if self.reloads else self.connected[0].name

    # -- who is there

    def wait_until_there(self, timeout_s: float) -> bool:
        """Waits until a server is usable, for at most `timeout_s` seconds; returns whether one is.

        The first call waits for all, as they are being started; missing ones are reported and looked for later.
        """
        if self._watcher.is_alive():
            with self._changed:
                return self._changed.wait_for(lambda: any(replica.is_usable for replica in self.replicas), timeout_s)
        waits = [self._pool.submit(replica.client.wait_until_healthy, timeout_s) for replica in self.replicas]
        are_there = [wait.result() for wait in waits]
        if self.reloads:
            for replica, is_there in zip(self.replicas, are_there, strict=True):
                replica.is_usable = is_there
            missing = [replica.url for replica in self.replicas if not replica.is_usable]
            if missing and any(are_there):
                print_status(f"warning: no rollout server answers at {', '.join(missing)}; going on with the others")
        return any(are_there)

    def check(self, config: ModelConfig, *, in_form: bool = False) -> None:
        """Checks each server as its own `check` does; in_form: and its grammars. Later ones are checked before they are
        used."""
        self._config, self._in_form = config, in_form
        for replica in self.usable:
            server = replica.server or self._connect(replica.client)
            if replica.server is None or not self.reloads:
                self._check_one(server)
            replica.server = server
        self.context = min(server.context for server in self.connected)
        if self.reloads and not self._watcher.is_alive() and not self._closing.is_set():
            self._watcher.start()

    def _check_one(self, server: RolloutServer) -> None:
        assert self._config is not None, "servers that were there at first have been checked"
        server.check(self._config)
        if self._in_form:
            server.check_grammars()

    def _lose(self, replica: Replica, error: Exception) -> None:
        if not self.reloads:
            return
        with self._changed:
            was_usable, replica.is_usable = replica.is_usable, False
            others = sum(other.is_usable for other in self.replicas)
        if was_usable:
            print_status(f"warning: {error}; it is left out, and {others} rollout servers go on")

    def _watch(self) -> None:
        """Looks for servers that are gone, until the end."""
        while not self._closing.wait(POLL_S):
            for replica in self.replicas:
                if not replica.is_usable and replica.refused_at != self._weights.label and _is_healthy(replica.client):
                    self._take_back(replica)

    def _take_back(self, replica: Replica) -> None:
        """Gives a server that is there again the present weights; it is usable if it passes the canary."""
        with self._control:
            if self._is_idle or self._closing.is_set():
                return  # what it would have to do then is not known to the others either: later
            try:
                start = time.monotonic()
                self._prepare(replica)
            except (ConnectionLost, OSError):
                return
            except DanluError as error:
                replica.refused_at = self._weights.label
                print_status(
                    f"warning: {replica.url} is there again, but not asked until it has other weights: {error}"
                )
                return
            with self._changed:
                replica.is_usable = True
                self._changed.notify_all()
            took_s = time.monotonic() - start
            print_status(f"{replica.url} is there again with weights {self._weights.label} ({took_s:.1f} s)")

    def _prepare(self, replica: Replica) -> None:
        """Raises ModelError for a server of another kind, TrainingError for one that does not pass the canary."""
        server, weights = self._connect(replica.client), self._weights
        self._check_one(server)
        if server.context < self.context:
            raise ModelError(
                f"{replica.url}: started for {server.context} tokens, and the others for {self.context}: start it with "
                "as much room"
            )
        is_same = server.version_label() == weights.label
        if is_same and replica.server is not None and replica.server.is_asleep:
            server.wake()
        server.pause("abort")
        if not is_same and weights.load is not None:
            weights.load(server)
        server.label_version(weights.label)
        server.drop_prefix_cache()
        server.resume()
        if weights.canary is not None:
            weights.canary.check(server)
        replica.server = server

    # -- answers

    def answer(self, continuation: Continuation) -> ServerAnswer:
        """Answers with the least loaded server; with another where that one is lost meanwhile. Raises ConnectionLost
        where none is left, or none goes on."""
        lost: Exception = ConnectionLost(f"{self.address}: none of the rollout servers is there")
        for _ in self.replicas:
            with self._least_loaded(continuation.request_id) as replica:
                if replica is None:
                    break
                try:
                    answer = replica.connected.answer(continuation)
                    foreign = answer.foreign_labels
                    if not (foreign and self.reloads):
                        return answer
                    lost = ConnectionLost(f"{replica.url}: it was restarted and has weights {sorted(foreign)}")
                except ConnectionLost as error:
                    lost = error
                except RequestRefused as error:
                    # One that is there failed at this request, as another would: who asks knows how often it did.
                    is_there = error.status == FAILED and self.reloads and _is_healthy(replica.client)
                    if error.status < 500 or is_there:
                        raise
                    lost = error
            self._lose(replica, lost)
            if self._is_idle:
                break
        raise lost

    @contextmanager
    def _least_loaded(self, request_id: str) -> Iterator[Replica | None]:
        """The usable server with the fewest requests, with one more for as long as the block; None: there is none."""
        with self._changed:
            replica = min(
                (each for each in self.replicas if each.is_usable), key=lambda each: each.in_flight, default=None
            )
            if replica is not None:
                replica.in_flight += 1
                self._places[request_id] = replica
        try:
            yield replica
        finally:
            if replica is not None:
                with self._changed:
                    replica.in_flight -= 1
                    self._places.pop(request_id, None)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Has the servers that work on these requests end them as they are."""
        with self._changed:
            servers = {request_id: self._places[request_id].server for request_id in request_ids & self._places.keys()}

        def abort(server: RolloutServer) -> None:
            if own := [request_id for request_id in request_ids if servers.get(request_id) is server]:
                server.abort(own)

        self.each(abort)

    # -- control of all

    def each(self, tell: Callable[[RolloutServer], Result], *, idle: bool | None = None) -> list[Result]:
        """Calls `tell` for all usable servers at once, and returns its results; one that is gone is left out. Raises
        the error of one that refuses.

        idle: whether answers are not wanted from then on; None: as before.
        """

        def tell_one(replica: Replica) -> list[Result]:
            try:
                return [tell(replica.connected)]
            except (ConnectionLost, RequestRefused) as error:
                if not self.reloads or (isinstance(error, RequestRefused) and error.status < 500):
                    raise
                self._lose(replica, error)
                return []

        with self._control:
            if idle is not None:
                self._is_idle = True
            results = list(chain.from_iterable(self._pool.map(tell_one, self.usable)))
            if idle is not None:
                self._is_idle = idle
        return results

    # -- weights

    def version_label(self) -> str:
        """Returns the label of the weights of all of them, or of the only one."""
        return self._weights.label if self.reloads else self.connected[0].version_label()

    def label_version(self, label: str) -> None:
        """Gives the weights that are loaded a label."""
        with self._control:
            self._weights.label = label
            self.each(lambda server: server.label_version(label))

    def load(self, load: Callable[[RolloutServer], None], label: str) -> None:
        """Hands weights to all, and later to those that come back. load: hands them to one."""
        with self._control:
            self._weights = Weights(label, load)
            self.each(load)

    def accept(self, canary: CanaryAnswers) -> None:
        """Keeps the answers of a canary that passed, as those of a server with the present weights.

        Raises TrainingError, with its url, where one of them answers otherwise.
        """
        with self._control:
            self.each(canary.check)
            self._weights.canary = canary

    def close(self) -> None:
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(HEALTH_TIMEOUT_S)
        self._pool.shutdown(wait=False)


def _is_healthy(client: HTTPClient) -> bool:
    return replace(client, timeout_s=min(client.timeout_s, HEALTH_TIMEOUT_S)).wait_until_healthy(0)
