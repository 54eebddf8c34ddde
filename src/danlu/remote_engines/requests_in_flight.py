"""Requests that a rollout server is working on, each in a thread that waits for it."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from danlu.inference.answer import Answer
from danlu.remote_engines.fleet import ServerFleet
from danlu.remote_engines.server_interface import Continuation, ServerAnswer

Outcome = ServerAnswer | Exception


class RequestsInFlight:
    """Requests in flight, for one thread, which sends and receives; the threads of the pool touch nothing but the queue
    of outcomes."""

    def __init__(self, servers: ServerFleet, connections: int) -> None:
        self._servers, self._connections = servers, connections
        self._executor = ThreadPoolExecutor(connections, thread_name_prefix="rollout-request")
        self._outcomes: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()
        self._answers: dict[str, Answer] = {}  # by the request's id at the server
        self._abandoned: list[str] = []  # ids of requests with answers that are no longer wanted
        self._prefix = f"danlu-{uuid.uuid4().hex[:8]}"  # several engines may ask one server
        self._sent_count = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def is_full(self) -> bool:
        return len(self._answers) >= self._connections

    def send(self, answer: Answer, adapter: str | None) -> None:
        """Requests an answer, or the missing part of it."""
        self._sent_count += 1
        request = answer.request
        continuation = Continuation(
            request_id=f"{self._prefix}-{request.number}-{answer.sample}-{self._sent_count}",
            request=request,
            tokens=tuple(answer.tokens),
            max_new_tokens=answer.longest - len(answer.drawn),
            adapter=adapter,
            sample=answer.sample,
        )
        self._answers[continuation.request_id] = answer
        self._executor.submit(self._ask, continuation)

    def _ask(self, continuation: Continuation) -> None:
        try:
            self._outcomes.put((continuation.request_id, self._servers.answer(continuation)))
        except Exception as error:
            self._outcomes.put((continuation.request_id, error))

    def receive(self, *, wait: bool, timeout_s: float | None = None) -> list[tuple[Answer, Outcome]]:
        """Returns the outcomes that have arrived; with `wait` it waits for the first one, if anything was sent."""
        arrived: list[tuple[Answer, Outcome]] = []
        while True:
            try:
                request_id, outcome = self._outcomes.get(wait and not arrived and bool(self._answers), timeout_s)
            except queue.Empty:
                return arrived
            if (answer := self._answers.pop(request_id, None)) is not None:
                arrived.append((answer, outcome))

    def abandon(self, wanted: Callable[[Answer], bool] = lambda answer: True) -> list[Answer]:
        """Waits no longer for certain answers, whatever the server says of them; returns them."""
        abandoned = {request_id: answer for request_id, answer in self._answers.items() if wanted(answer)}
        for request_id in abandoned:
            del self._answers[request_id]
        self._abandoned += abandoned
        return list(abandoned.values())

    def abort_abandoned(self) -> None:
        """Has the server forget them, too."""
        if self._abandoned:
            self._servers.abort(self._abandoned)
        self._abandoned = []

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
