"""Several rollout servers as one: the least loaded is asked, and requests of a lost one are answered by the others.

A server that does not answer any more is left out. One that is there again gets the present weights from the files of
the latest hand-over, has to answer a canary's prompts as the others did, and then gets requests again. Draws follow
from requests, so it makes no difference which server answers (with `danlu serve`; the others draw alike where they
round alike).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from danlu.core.errors import DanluError, ModelError
from danlu.core.http_client import ConnectionLost, HTTPClient, RequestRefused
from danlu.core.terminal import print_status
from danlu.inference.request import Request
from danlu.remote_engines.canary import CanaryAnswers
from danlu.remote_engines.server_interface import Continuation, RolloutServer, ServerAnswer, TakesFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from danlu.models.config import ModelConfig

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
    is_asleep: bool = False
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


class ServerFleet(TakesFiles):
    """A `RolloutServer` over several; its calls reach all that are usable.

    Args:
        clients: one for each server. connect: detects the kind of a server.
        exact: whether each of them must be exact.
    """

    name = "the rollout servers"

    def __init__(self, clients: Sequence[HTTPClient], connect: Connect, *, exact: bool = False) -> None:
        assert clients, "a fleet has servers"
        self.replicas = [Replica(client) for client in clients]
        self.exact = exact
        self.context = 0
        self._connect = connect
        self._config: ModelConfig | None = None
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
    def address(self) -> str:
        return ", ".join(replica.url for replica in self.replicas)

    @property
    def usable(self) -> list[Replica]:
        """Those that are asked now."""
        with self._changed:
            return [replica for replica in self.replicas if replica.is_usable]

    # -- who is there

    def wait_until_there(self, timeout_s: float) -> bool:
        """Waits until a server is usable, for at most `timeout_s` seconds; returns whether one is.

        The first call waits for all, as they are being started; missing ones are reported and looked for later.
        """
        if not self._watcher.is_alive():
            waits = [self._pool.submit(replica.client.wait_until_healthy, timeout_s) for replica in self.replicas]
            for replica, wait in zip(self.replicas, waits, strict=True):
                replica.is_usable = wait.result()
            missing = [replica.url for replica in self.replicas if not replica.is_usable]
            if missing and len(missing) < len(self.replicas):
                print_status(f"warning: no rollout server answers at {', '.join(missing)}; going on with the others")
            return len(missing) < len(self.replicas)
        with self._changed:
            return self._changed.wait_for(lambda: any(replica.is_usable for replica in self.replicas), timeout_s)

    def check(self, config: ModelConfig) -> None:
        """Checks each server as its own `check` does. Later ones are checked before they are used."""
        self._config = config
        for replica in self.usable:
            if replica.server is None:
                server = self._connect(replica.client)
                server.check(config)
                replica.server = server
        self.context = min(replica.connected.context for replica in self.replicas if replica.server is not None)
        if not self._watcher.is_alive() and not self._closing.is_set():
            self._watcher.start()

    def _lose(self, replica: Replica, error: Exception) -> None:
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
        assert self._config is not None, "servers that were there at first have been checked"
        server.check(self._config)
        if server.context < self.context:
            raise ModelError(
                f"{replica.url}: started for {server.context} tokens, and the others for {self.context}: start it with "
                "as much room"
            )
        is_same = server.version_label() == weights.label
        if is_same and replica.is_asleep:
            server.wake()
        server.pause("abort")
        if not is_same and weights.load is not None:
            weights.load(server)
        server.label_version(weights.label)
        server.drop_prefix_cache()
        server.resume()
        if weights.canary is not None:
            weights.canary.check(server)
        replica.server, replica.is_asleep = server, False

    # -- answers

    def problem(self, request: Request) -> str | None:
        problems = (replica.connected.problem(request) for replica in self.replicas if replica.server is not None)
        return next((problem for problem in problems if problem is not None), None)

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
                    foreign = {label for label in answer.version_labels if not label.isdecimal()}
                    if not foreign:
                        return answer
                    lost = ConnectionLost(f"{replica.url}: it was restarted and has weights {sorted(foreign)}")
                except ConnectionLost as error:
                    lost = error
                except RequestRefused as error:
                    # One that is there failed at this request, as another would: who asks knows how often it did.
                    if error.status < 500 or (error.status == FAILED and _is_healthy(replica.client)):
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
        with self._changed:
            places = {request_id: self._places.get(request_id) for request_id in request_ids}

        def abort(replica: Replica) -> None:
            if own := [request_id for request_id, place in places.items() if place is replica]:
                replica.connected.abort(own)

        self._each(abort)

    # -- what all are told

    def _each(self, tell: Callable[[Replica], None]) -> None:
        """Calls `tell` for all usable servers at once; one that is gone is left out. Raises the error of one that
        refuses."""

        def tell_one(replica: Replica) -> None:
            try:
                tell(replica)
            except ConnectionLost as error:
                self._lose(replica, error)
            except RequestRefused as error:
                if error.status < 500:
                    raise
                self._lose(replica, error)

        with self._control:
            list(self._pool.map(tell_one, self.usable))

    def pause(self, mode: Literal["abort", "keep"]) -> None:
        with self._control:
            self._is_idle = True
            self._each(lambda replica: replica.connected.pause(mode))

    def resume(self) -> None:
        with self._control:
            self._each(lambda replica: replica.connected.resume())
            self._is_idle = False

    def sleep(self) -> None:
        def sleep(replica: Replica) -> None:
            replica.connected.sleep()
            replica.is_asleep = True

        with self._control:
            self._is_idle = True
            self._each(sleep)

    def wake_weights(self) -> None:
        self._each(lambda replica: replica.connected.wake_weights())

    def wake(self) -> None:
        def wake(replica: Replica) -> None:
            replica.connected.wake()
            replica.is_asleep = False

        with self._control:
            self._each(wake)
            self._is_idle = False

    def drop_prefix_cache(self) -> None:
        self._each(lambda replica: replica.connected.drop_prefix_cache())

    # -- weights

    def version_label(self) -> str:
        return self._weights.label

    def label_version(self, label: str) -> None:
        with self._control:
            self._weights.label = label
            self._each(lambda replica: replica.connected.label_version(label))

    def load_folder(self, folder: Path, label: str) -> None:
        self._hand_over(lambda server: server.load_folder(folder, label), label)

    def load_adapter(self, name: str, folder: Path) -> None:
        """The label comes after it."""
        self._hand_over(lambda server: server.load_adapter(name, folder), self._weights.label)

    def _hand_over(self, load: Callable[[RolloutServer], None], label: str) -> None:
        with self._control:
            self._weights = Weights(label, load)
            self._each(lambda replica: load(replica.connected))

    def accept(self, canary: CanaryAnswers) -> None:
        """Keeps the answers of a canary that passed, as those of a server with the present weights.

        Raises TrainingError, with its url, where one of them answers otherwise.
        """
        with self._control:
            self._each(lambda replica: canary.check(replica.connected))
            self._weights.canary = canary

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        names: list[str] = []
        several = len(self.replicas) > 1

        def compare(replica: Replica) -> None:
            where = f" ({replica.url})" if several else ""
            names.extend(f"{name}{where}" for name in replica.connected.differing(tensors))

        self._each(compare)
        return names

    def close(self) -> None:
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(HEALTH_TIMEOUT_S)
        self._pool.shutdown(wait=False)


def _is_healthy(client: HTTPClient) -> bool:
    return replace(client, timeout_s=min(client.timeout_s, HEALTH_TIMEOUT_S)).wait_until_healthy(0)
